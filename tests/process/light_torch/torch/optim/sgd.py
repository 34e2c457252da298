"""Imported after the module that has the hooks, as with the real one."""

from torch.optim.optimizer import hooks


class SGD:
    def step(self) -> None:
        for hook in hooks:
            hook(self, (), {})
