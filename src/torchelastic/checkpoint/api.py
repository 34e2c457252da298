"""A module name of 0.1's."""

from torchelastic.checkpoint.checkpoint_util import CheckpointUtil as CheckpointUtil
from torchelastic.checkpoint.manager import Checkpoint as Checkpoint
from torchelastic.checkpoint.manager import CheckpointManager as CheckpointManager
from torchelastic.checkpoint.manager import get_checkpoint_manager as get_checkpoint_manager
from torchelastic.checkpoint.manager import set_checkpoint_manager as set_checkpoint_manager
from torchelastic.compat.old_names import __getattr__ as __getattr__
