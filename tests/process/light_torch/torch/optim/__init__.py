"""An optimizer that has nothing to optimize, and tells of its steps as torch's do."""

from torch.optim import optimizer as optimizer
from torch.optim.sgd import SGD as SGD
