"""`Guard`: judges every step before it is kept, and leaves out those with bad numbers.

A step is judged by numbers that are equal on all ranks. So all decide alike, and send
nothing for it but the losses that the script passes:

    the norm of the gradients   after their reduction and before clipping, which hides spikes: at
                                the end of a backward that reduces (DDP, FSDP2), or of the loop over
                                fixed micro-batches; under a GradScaler divided by the scale
    the loss                    the mean over ranks of what the script passes to `guard.loss`; with
                                fixed micro-batches the loss of the whole batch

The verdict is given in the pre-hook of the first `optimizer.step` after that, before anything is
written, for all optimizers that step before the next backward; without a write, at the end of the
step. Gradients that we do not reduce (a script without DDP, `ddp=False`) have local norms: one
all-reduce there adds them. With a sharded model they ride on the joint all-reduce.

    not finite   bad. Not if the GradScaler skips the update itself: that is its way to find a scale
    a spike      bad: larger than all values of the window, and further above their median than
                 `spike` robust standard deviations (`judge`)
    else         good: the values go into the window

From a bad verdict to the end of the step, optimizers have no gradients, so `optimizer.step` changes
nothing and nothing is raised. At the end of the step everything is undone (`training.undo`), also
what an optimizer wrote before a later backward of the step went wrong. Then `response` decides:

    skip    the step becomes an empty one: the state of its beginning, but the sampler has moved on
    retry   the step is repeated once, then skipped (`train` only: a script has its own loop)
    stop    training ends with an error, after a checkpoint of the state of the step's beginning if
            the script has a checkpoint manager

The windows and the latest bad steps are part of the state: sent to joiners, undone with a step that
fails, kept in snapshots and checkpoints. Otherwise ranks would decide differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

from torchelastic import checkpoint
from torchelastic.data.progress import Handed
from torchelastic.errors import ConfigError

Action = Literal["skip", "retry", "stop"]
ACTIONS: tuple[Action, ...] = ("skip", "retry", "stop")

#: The median absolute deviation times this is the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826
#: The least standard deviation: of a logarithm; of losses not all positive, relative to the median.
_LEAST_SIGMA = 0.1


# --- decisions: pure ------------------------------------------------------------------------------


class Window(NamedTuple):
    """The latest good values."""

    norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    def with_values(self, norm: float | None, loss: float | None, size: int) -> Window:
        """Return the window with the values of a good step, as far as they are known."""
        return Window(
            self.norms if norm is None else (*self.norms, norm)[-size:],
            self.losses if loss is None else (*self.losses, loss)[-size:],
        )


class StepVerdict(NamedTuple):
    """`reason` is empty if the values are good."""

    reason: str = ""
    #: Robust standard deviations above the median; 0.0 if that was not computed.
    deviation: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The settings of a `Guard`, which are the same on all ranks."""

    on_bad: Action | Callable[[BadStep], Action] = "skip"
    spike: float | None = 10.0
    window: int = 128
    min_steps: int = 64
    limit: int = 10
    check_every: int | None = None
    audit: float | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in ACTIONS and not callable(self.on_bad):
            raise ConfigError(
                f"on_bad must be one of {', '.join(ACTIONS)}, or a function, not {self.on_bad!r}."
            )
        if self.spike is not None and not self.spike > 0:
            raise ConfigError(f"spike must be above 0, or None for no such check: {self.spike}.")
        for name in ("window", "min_steps", "limit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.check_every is not None and self.check_every < 1:
            raise ConfigError(
                f"check_every must be at least 1 step, or None for no check: {self.check_every}."
            )
        if self.audit is not None and not 0 < self.audit <= 1:
            raise ConfigError(
                f"audit is the part of micro-batches to repeat, above 0 and up to 1: {self.audit}."
            )
        if self.min_steps > self.window:
            raise ConfigError(
                f"min_steps ({self.min_steps}) is larger than the window ({self.window}): no spike "
                "would ever be found."
            )

    def form(self) -> list[tuple[str, str]]:
        """Return the settings that must be the same on all workers: they decide alike."""
        on_bad = "a function" if callable(self.on_bad) else repr(self.on_bad)
        names = ("spike", "window", "min_steps", "limit", "check_every")
        values = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return [("the guard", f"on_bad={on_bad}, {values}")]


GOOD = StepVerdict()


def judge(
    window: Window, norm: float | None, loss: float | None, config: GuardConfig
) -> StepVerdict:
    """Return the verdict on the norm of a gradient and on the loss, as far as they are known."""
    if norm is not None and not math.isfinite(norm):
        return StepVerdict("the gradient is not finite")
    if loss is not None and not math.isfinite(loss):
        return StepVerdict("the loss is not finite")
    if config.spike is None:
        return GOOD
    if norm is not None and len(window.norms) >= config.min_steps and norm > max(window.norms):
        deviation = _log_deviation(window.norms, norm)
        if deviation > config.spike:
            return StepVerdict("the norm of the gradient is a spike", deviation)
    if loss is not None and len(window.losses) >= config.min_steps and loss > max(window.losses):
        # Small ones spread as norms do: their linear deviation is small, and a healthy one a spike.
        measure = _log_deviation if min(window.losses) > 0 else _deviation
        deviation = measure(window.losses, loss)
        if deviation > config.spike:
            return StepVerdict("the loss is a spike", deviation)
    return GOOD


def _log_deviation(values: Sequence[float], value: float) -> float:
    """Positive values spread over orders of magnitude, so their logarithms are compared."""
    known = [math.log(one) for one in values if one > 0]
    if not known or value <= 0:
        return 0.0
    middle = median(known)
    sigma = _MAD_TO_SIGMA * median(abs(one - middle) for one in known)
    return (math.log(value) - middle) / max(sigma, _LEAST_SIGMA)


def _deviation(values: Sequence[float], value: float) -> float:
    middle = median(values)
    sigma = _MAD_TO_SIGMA * median(abs(one - middle) for one in values)
    least = _LEAST_SIGMA * abs(middle)
    return (value - middle) / max(sigma, least, 1e-12)


def response(action: Action, bad_steps: Sequence[int], step: int, config: GuardConfig) -> Action:
    """Return what is done about a bad step, after the earlier ones of the window."""
    if 1 + sum(step - config.window < one < step for one in bad_steps) >= config.limit:
        return "stop"
    if action == "retry" and step in bad_steps:
        return "skip"
    return action


# --- the part of a state --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadStep:
    """A step that was judged bad, as one rank knows it."""

    #: The number of the step, as in the ledger: the first is 1.
    step: int
    rank: int
    #: A sentence without a period: "the gradient is not finite".
    reason: str
    norm: float
    #: The mean over ranks; None if it is not known.
    loss: float | None
    #: Robust standard deviations above the median; 0.0 if it is no spike.
    deviation: float
    #: Whether this rank's own numbers were bad before they were added to the others': its loss, or
    #: a few of its gradients.
    is_origin: bool
    #: This rank's samples of the step.
    samples: tuple[Handed, ...] = ()
    #: With fixed micro-batches: those of this rank whose own numbers were bad.
    micro_batches: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        above = f", {self.deviation:.1f} deviations above the median" if self.deviation else ""
        return f"step {self.step} is bad: {self.reason} (norm {self.norm:.6g}{loss}{above})"


def why_it_ends(why: str, step: int) -> str:
    """Return the error message of a job that a bad step ends; `step` is the last good one."""
    stored = checkpoint.get_checkpoint_manager() is not None
    kept = f"Step {step} is in the checkpoint." if stored else "There is no checkpoint."
    return (
        f"Training ends: {why}. {kept} Look at the samples of the step (torchelastic skipped), or "
        "change on_bad or limit of the Guard."
    )


class GuardHistory(NamedTuple):
    """The memory of a guard: equal on all ranks. Immutable, so it is saved without a copy."""

    #: One for each verdict of a step: a step that writes after each of two backwards has two.
    windows: tuple[Window, ...] = ()
    #: The latest bad steps.
    bad: tuple[int, ...] = ()
    #: The last step that was skipped.
    skipped: int = -1


class Guard:
    """Judges every step before it is kept. Pass it to `TorchState(..., guard=Guard())`.

    A step is bad if its gradient or its loss is not finite, or is a spike: larger than any of the
    latest `window` steps, and further above their median than `spike` robust standard deviations
    (of the logarithm, if all are positive). `spike=None` looks for no spikes; none are found before
    `min_steps` good steps. Pass the loss to `guard.loss` in each step if it is to be judged; with
    `BatchPolicy.fixed` it is known.

    `on_bad`: "skip" makes the step an empty one, and its samples are listed as skipped; "retry"
    repeats it once first (in `train`), which helps against passing faults of a machine; "stop" ends
    the training. A function gets a `BadStep` and returns one of these; the answer of rank 0 counts.
    The `limit`-th bad step within `window` steps ends the training.

    `check_every=100` also compares the states of all workers every 100 steps: parameters and
    optimizer state must be bitwise equal. A worker whose state differs is replaced, and the
    others go back to the last step at which all were equal. Each worker keeps two copies of its
    state for that. In a script that uses `commit`, all processes are restarted, and nothing is
    undone. Sharded models are not compared.

    `audit=0.001`, with `BatchPolicy.fixed`, has another worker repeat about one of 1000
    micro-batches. A worker that computed different gradients is replaced, and the step is taken
    again.
    """

    def __init__(
        self,
        *,
        on_bad: Action | Callable[[BadStep], Action] = "skip",
        spike: float | None = 10.0,
        window: int = 128,
        min_steps: int = 64,
        limit: int = 10,
        check_every: int | None = None,
        audit: float | None = None,
    ) -> None:
        self.config = GuardConfig(
            on_bad=on_bad,
            spike=spike,
            window=window,
            min_steps=min_steps,
            limit=limit,
            check_every=check_every,
            audit=audit,
        )
        self.history = GuardHistory()
        #: Called with every bad step, on all ranks, when its state has been undone.
        self.listeners: list[Callable[[BadStep], object]] = []
        #: Receives the losses; set by the state that this is a part of.
        self.take_loss: Callable[[Any], object] | None = None

    @staticmethod
    def number_of(action: object) -> int:
        """Return the number of an action that a function has returned."""
        if action not in ACTIONS:
            raise ConfigError(f"on_bad must return one of {', '.join(ACTIONS)}, not {action!r}.")
        return ACTIONS.index(action)

    def loss(self, value: Any) -> None:
        """Pass the loss of this rank: a number, or a tensor with one. Call it on all ranks, once
        for each backward, before `optimizer.step`; it does not wait."""
        if self.take_loss is None:
            raise RuntimeError(
                "Pass this Guard to a TorchState, and begin training, before loss()."
            )
        self.take_loss(value)

    def state_dict(self) -> dict[str, Any]:
        windows, bad, skipped = self.history
        kept = [[list(one.norms), list(one.losses)] for one in windows]
        return {"windows": kept, "bad": list(bad), "skipped": skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        windows = [Window(tuple(norms), tuple(losses)) for norms, losses in state["windows"]]
        self.history = GuardHistory(tuple(windows), tuple(state["bad"]), state["skipped"])
