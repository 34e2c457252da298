"""Learning rates that follow samples instead of steps, and the size of the world if asked.

scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
schedule = SampleSchedule(scheduler, unit=256)      # T_max is 1000 * 256 samples
...
optimizer.step()
schedule.step(samples)                              # of all ranks, in this step
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.data.own_rank import own_rank
from torchelastic.errors import ConfigError


class SampleSchedule:
    """Steps a torch scheduler once for every `unit` samples that all ranks have used.

    After n samples the scheduler has taken n // unit steps, whatever the batch sizes were: resizes
    do not change the learning rate. If every step takes `unit` samples, this equals the scheduler.

    With a `policy`, every `optimizer.step` uses the scheduler's rate times
    `policy.lr_factor(size)`, for the current world size. The scheduler never sees the product: most
    compute the next rate from the last one, and would carry the factor of one world into the next.

    It is a part for TorchState, in place of the scheduler: `TorchState(..., scheduler=schedule)`.
    """

    def __init__(
        self, scheduler: LRScheduler, *, unit: int, policy: BatchPolicy | None = None
    ) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau follows a metric, not samples: step it yourself.")
        if unit < 1:
            raise ConfigError(f"unit is {unit}: it must be at least 1 sample.")
        self.scheduler = scheduler
        self.unit = unit
        self.policy = policy
        #: Samples that all ranks have used.
        self.samples = 0
        self._optimizer = scheduler.optimizer
        #: The rates that the scheduler computed, one per parameter group.
        self._rates = self._present()
        if policy is not None:
            self._optimizer.register_step_pre_hook(self._before_step)

    def step(self, samples: int | None = None) -> None:
        """Count `samples` of all ranks as used; the default is the batch of the policy.

        Call it after `optimizer.step`, as you would call a scheduler's `step`.
        """
        if samples is None:
            samples = self._batch()
        if samples < 0:
            raise ConfigError(f"samples is {samples}: it must be 0 or more.")
        due = (self.samples + samples) // self.unit - self.samples // self.unit
        self.samples += samples
        if due:
            self._put(self._rates)
            for _ in range(due):
                self.scheduler.step()
            self._rates = self._present()
            self._put(self.get_last_lr())

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group, for the current world size."""
        factor = 1.0 if self.policy is None else self.policy.lr_factor(own_rank().size)
        return [rate * factor for rate in self._rates]

    def state_dict(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "samples": self.samples,
            "rates": list(self._rates),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Load the optimizer's first: it has the rates of another world."""
        if state["unit"] != self.unit:
            raise ConfigError(
                f"unit is {self.unit}, but this state was saved with {state['unit']}, so the "
                "scheduler would continue at the wrong step. Use the same unit, or start a new "
                "schedule."
            )
        self.samples = state["samples"]
        self._rates = list(state["rates"])
        self.scheduler.load_state_dict(state["scheduler"])
        self._put(self.get_last_lr())

    def _batch(self) -> int:
        if self.policy is None:
            raise ConfigError(
                "step() needs the samples of all ranks: call step(samples), or set policy=."
            )
        return self.policy.batch(own_rank().size)

    def _before_step(self, *_: object) -> None:
        # Every time: undoing a step restores the rate of the world it was begun in.
        self._put(self.get_last_lr())

    def _present(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _put(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # others hold it: compiled optimizers, CUDA graphs
            else:
                group["lr"] = rate
