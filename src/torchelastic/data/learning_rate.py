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
    """Steps a scheduler of torch once for every `unit` samples that all ranks together have used.

    After n samples the scheduler has taken n // unit steps, whatever the batches were on the way:
    after any resizes the learning rate is that of a run without them. Where every step takes `unit`
    samples this is the scheduler itself.

    With a `policy` every `optimizer.step` uses the scheduler's rate times `policy.lr_factor(size)`,
    for the size that the world has then. The scheduler never sees the product: most compute the
    next rate from the last one, and would carry the factor of one world into the next.

    It is a part for TorchState, in place of the scheduler: `TorchState(..., scheduler=schedule)`.
    """

    def __init__(
        self, scheduler: LRScheduler, *, unit: int, policy: BatchPolicy | None = None
    ) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau follows a metric, not samples: step it yourself.")
        if unit < 1:
            raise ConfigError(f"unit is {unit}: it is a number of samples, 1 or more.")
        self.scheduler = scheduler
        self.unit = unit
        self.policy = policy
        #: How many samples all ranks together have used.
        self.samples = 0
        self._optimizer = scheduler.optimizer
        #: What the scheduler has made of the rates, one for each group of parameters.
        self._rates = self._present()
        if policy is not None:
            self._optimizer.register_step_pre_hook(self._before_step)

    def step(self, samples: int | None = None) -> None:
        """So many samples of all ranks are used; with a policy its batch, if it is not said.

        To be called after `optimizer.step`, like a scheduler's.
        """
        if samples is None:
            samples = self._batch()
        if samples < 0:
            raise ConfigError(f"{samples} samples cannot be used: it must be 0 or more.")
        due = (self.samples + samples) // self.unit - self.samples // self.unit
        self.samples += samples
        if due:
            self._put(self._rates)
            for _ in range(due):
                self.scheduler.step()
            self._rates = self._present()
            self._put(self.get_last_lr())

    def get_last_lr(self) -> list[float]:
        """The rate of each group of parameters, in a world of the present size."""
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
        """Go on from there; after the optimizer's, which has the rates of another world."""
        if state["unit"] != self.unit:
            raise ConfigError(
                f"unit is {self.unit}, but this state was kept with {state['unit']}: the scheduler "
                "would be at another place. Give the same, or begin a new schedule."
            )
        self.samples = state["samples"]
        self._rates = list(state["rates"])
        self.scheduler.load_state_dict(state["scheduler"])
        self._put(self.get_last_lr())

    def _batch(self) -> int:
        if self.policy is None:
            raise ConfigError(
                "How many samples were used? Say step(samples), of all ranks, or give a policy."
            )
        return self.policy.batch(own_rank().size)

    def _before_step(self, *_: object) -> None:
        # Every time: a step that is undone puts back the rate of the world it was begun in.
        self._put(self.get_last_lr())

    def _present(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _put(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # others hold it: compiled optimizers, CUDA graphs
            else:
                group["lr"] = rate
