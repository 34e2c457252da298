"""The work of a `Guard` in each step: measure, judge, keep optimizers from writing, remember.

    guard.loss(value)      an all-reduce of 16 bytes begins
    a backward has ended   its norm is computed, not waited for (with fixed micro-batches: a loop)
    optimizer.step         the first one after it reads norm and loss, and judges them. Of a bad
                           step it sees no gradients
    the end of the step    anything not judged yet is judged; the values of a good step are kept

In a sharded training norm and loss are added up in the joint all-reduce of the step (`own`,
`joined`), and there is one verdict, after it.

What a bad step has changed is undone by the state that it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchelastic import torch_backends, torch_private
from torchelastic.tensors.dtensors import is_sharded, local_or_whole
from torchelastic.tensors.module_state import parameters_of
from torchelastic.torch_private import SCALER_TENSORS
from torchelastic.training.group import backward
from torchelastic.training.step_guard import Guard, GuardHistory, StepVerdict, Window, judge

#: The most elements of a gradient that is looked at before it is added to the others'.
PROBED = 4096


class FoundBad(NamedTuple):
    """Why a step is bad."""

    verdict: StepVerdict
    norm: float
    loss: float | None
    is_origin: bool


class _Loss(NamedTuple):
    """A loss on its way: this rank's, the sum over ranks and their number, and the all-reduce."""

    own: torch.Tensor
    total: torch.Tensor
    work: Any


def _probes(model: nn.Module) -> list[nn.Parameter]:
    """Return a few small parameters, near both ends of a model: nearly all that is not finite in a
    backward reaches the gradient of one of them."""
    trained = [one for one in model.parameters() if one.requires_grad and not is_sharded(one)]
    small = [one for one in trained if one.numel() <= PROBED]
    return [*small[:2], *small[2:][-1:]]


class StepJudge:
    """Judges the steps of one state, one after the other."""

    def __init__(
        self,
        guard: Guard,
        gradients: Callable[[], Sequence[torch.Tensor]],
        scalers: Iterable[torch.amp.GradScaler],
        models: Iterable[nn.Module] = (),
        *,
        fixed_loss: Callable[[], float | None] | None = None,
    ) -> None:
        """`gradients` returns those that the step has computed so far. `fixed_loss` returns the
        loss of the whole batch, and its caller calls `measure`. Without it, `measure` runs after
        each backward, and hooks on `models` see whether this rank's own gradients are finite."""
        self._guard, self._gradients = guard, gradients
        self._scaler: Any = next((one for one in scalers if one.is_enabled()), None)
        self._fixed_loss = fixed_loss
        #: Whether the gradients are what optimizers will see: not in the middle of accumulating.
        self.is_reduced: Callable[[], bool] = lambda: True
        #: Whether ranks have different gradients, so that their norms must be added up.
        self.is_local = False
        #: Whether ranks have shards of one gradient.
        self.is_sharded = False
        #: Whether all workers add up their numbers in one all-reduce in each step.
        self.is_joint = False
        self._joined: tuple[float, float | None, float | None] | None = None
        #: Called after each backward and with each loss; optimizers may have written before.
        self.after_write: Callable[[], None] = lambda: None
        self._norm: torch.Tensor | None = None
        self._losses: list[_Loss] = []
        self._looked: torch.Tensor | None = None
        self._windows: list[Window] = []
        #: The gradients that optimizers do not see, while they step.
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._found: FoundBad | None = None
        #: The step that is repeated because it was bad; -1: none.
        self.retried = -1
        guard.take_loss = self._take_loss
        if fixed_loss is None:
            backward.after_each(self._after_backward)
            for model in models:
                for one in _probes(model):
                    one.register_hook(self._look)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a step."""
        self._norm, self._found, self._joined = None, None, None
        self._losses, self._windows, self._looked = [], [], None

    @torch.no_grad()
    def _look(self, own: torch.Tensor) -> None:
        """Add up gradients before their reduction; the sum is not finite if one is not."""
        total = (own.coalesce().values() if own.is_sparse else own).sum()
        self._looked = total if self._looked is None else self._looked + total.to(self._looked)

    # --- what is judged --------------------------------------------------------------------------

    def _after_backward(self) -> None:
        self.after_write()
        if self.is_reduced():
            self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the norm of the gradients, which are not clipped yet."""
        found = map(local_or_whole, self._gradients())
        dense = [one.coalesce().values() if one.is_sparse else one for one in found]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for one in dense:
            by_device.setdefault(one.device, []).append(one)
        norms = [
            torch.linalg.vector_norm(torch.stack([*torch_private.norms_of(some)]).double())
            for some in by_device.values()
        ]
        if not norms:
            return
        norm = norms[0] if len(norms) == 1 else torch.stack([one.cpu() for one in norms]).norm()
        if self._scaler is not None:
            scale = vars(self._scaler)[SCALER_TENSORS[0]]
            norm = norm if scale is None else norm / scale.to(norm.device)
        if self.is_joint and self._norm is not None:
            norm = torch.hypot(self._norm, norm)
        self._norm = norm

    @torch.no_grad()
    def _take_loss(self, value: Any) -> None:
        if self._fixed_loss is not None:
            return
        self.after_write()
        size = 1 if self.is_joint else _size()
        device = torch_backends.here() if size > 1 else "cpu"
        own = torch.as_tensor(value).detach().reshape(()).to(device, torch.float64, copy=True)
        total = torch.stack([own, torch.ones_like(own)])
        work = dist.all_reduce(total, async_op=True) if size > 1 else None
        self._losses.append(_Loss(own, total, work))

    def own(self) -> tuple[float, float, float]:
        """Return this worker's square of the norm, its loss, and the number of losses."""
        norm = 0.0 if self._norm is None else float(self._norm)
        loss = self._loss()[0]
        self._norm, self._joined = None, (norm, loss, loss)
        return norm * norm, loss or 0.0, float(loss is not None)

    def joined(self, square: float, loss: float, losses: float, replicas: int) -> None:
        """Take in the sum of what all workers have; all replicas have the same gradients."""
        assert self._joined is not None
        norm = _root(square / replicas)
        self._joined = norm, loss / losses if losses else None, self._joined[2]

    def _numbers(self) -> tuple[float | None, float | None, float | None]:
        """Return the norm, the mean loss over ranks, and the loss of this rank."""
        if self.is_joint:
            assert self._joined is not None
            return self._joined
        return self._global_norm(), *self._loss()

    def _loss(self) -> tuple[float | None, float | None]:
        if self._fixed_loss is not None:
            return self._fixed_loss(), None
        if not self._losses:
            return None, None
        for one in self._losses:
            if one.work is not None:
                one.work.wait()
        own = fmean(float(one.own) for one in self._losses)
        total = fmean(float(one.total[0] / one.total[1]) for one in self._losses)
        self._losses = []
        return total, own

    def _global_norm(self) -> float | None:
        if self._norm is None and not self.is_local:
            return None
        norm, self._norm = self._norm, None
        if norm is not None and not self.is_local:
            return float(norm)
        device = torch_backends.here()
        square = torch.zeros((), dtype=torch.float64, device=device)
        if norm is not None:
            square += norm.to(device).square()
        dist.all_reduce(square)
        # Shards are parts of one gradient; whole gradients of ranks do not grow with their number.
        return _root(float(square) / (1 if self.is_sharded else dist.get_world_size()))

    # --- the verdict -----------------------------------------------------------------------------

    def before_write(self, optimizer: Optimizer) -> bool:
        """Judge what was not judged yet; return whether the step is bad. Then the optimizer has no
        gradients until `after_step`."""
        if self._found is None and self._is_due:
            self._judge()
        if self._found is None:
            return False
        self._hidden = [(one, one.grad) for one in parameters_of(optimizer)]
        for parameter, _ in self._hidden:
            parameter.grad = None
        return True

    @property
    def _is_due(self) -> bool:
        if self.is_joint:
            return self._joined is not None and not self._windows
        return self._norm is not None or not self._windows

    def after_step(self) -> None:
        """Put the gradients back that an optimizer was not to see."""
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []

    def _judge(self) -> None:
        config, place = self._guard.config, len(self._windows)
        window = self._window(place)
        norm, loss, own = self._numbers()
        is_skipped_by_scaler = self._scaler is not None and not math.isfinite(norm or 0.0)
        judged = None if is_skipped_by_scaler else norm
        verdict = judge(window, judged, loss, config)
        if verdict.reason:
            is_origin = own is not None and bool(judge(window, None, own, config).reason)
            is_origin |= self._looked is not None and not math.isfinite(self._looked)
            self._found = FoundBad(verdict, math.nan if norm is None else norm, loss, is_origin)
        else:
            self._windows.append(window.with_values(judged, loss, config.window))

    def _window(self, place: int) -> Window:
        known = self._guard.history.windows
        return known[place] if place < len(known) else Window()

    def is_bad_loss(self, place: int, loss: float) -> bool:
        """Whether the loss of a part of the batch is bad, at this place of the step."""
        return bool(judge(self._window(place), None, loss, self._guard.config).reason)

    def end(self, step: int) -> FoundBad | None:
        """End the step with this number; return why it is bad, or remember its values."""
        if self._found is None and (self._is_due or (self._losses and not self.is_joint)):
            self._judge()
        found = self._found
        if found is None:
            windows, bad, skipped = self._guard.history
            if self.retried == step:
                bad = self.with_bad(step)
            windows = (*self._windows, *windows[len(self._windows) :])
            self._guard.history = GuardHistory(windows, bad, skipped)
        return found

    def with_bad(self, step: int) -> tuple[int, ...]:
        """Return the latest bad steps, with this one."""
        first = step - self._guard.config.window
        return (*(one for one in self._guard.history.bad if first < one < step), step)


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
