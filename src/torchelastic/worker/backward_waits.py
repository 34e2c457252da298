"""Estimate how long a script waits for other workers.

A script's collectives are torch's own, so their waiting time is not visible. But most of the
waiting is in one place. Gradients are ready when the backward reaches the first layer; the time
from then until the optimizer steps is mostly waiting for the gradients of others. So we record when
a gradient last became ready, for two parameters of each model or optimizer: the first, which is
usually the last to get one, and the last, for models that list their layers in another order.

Waiting elsewhere, in a forward or between two steps, counts as the worker's own time. Then all
ranks seem equally fast, and no rank is wrongly called slow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from torchelastic.worker_counters import stalls


class BackwardWaits:
    """Costs a call for each recorded gradient, and no system call."""

    def __init__(self, models: Iterable[Iterable[Any]]) -> None:
        """`models`: the parameters of each."""
        torch = sys.modules.get("torch")
        self._is_compiling = torch.compiler.is_compiling if torch is not None else lambda: False
        #: When the last gradient became ready since the last step of an optimizer, less what had
        #: been counted until then; None: none has.
        self._ready_at: float | None = None
        #: For removing the hooks.
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._ready)
            for parameter in _noted(models)
        ]

    def _ready(self, _: object) -> None:
        if not self._is_compiling():  # a compiled backward cannot call this
            self._ready_at = time.monotonic() - stalls.apart(stalls.seconds)

    def before_write(self) -> None:
        """An optimizer is about to step: the gradients of others have arrived."""
        if self._ready_at is not None:
            now = time.monotonic() - stalls.apart(stalls.seconds)
            stalls.add(stalls.PEERS, now - self._ready_at)
            self._ready_at = None

    def committed(self) -> None:
        """The step is done; forget gradients that no optimizer has used."""
        self._ready_at = None


def _noted(models: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the parameters to watch, each once, though models may share some."""
    found: dict[int, Any] = {}
    for model in models:
        trained = [parameter for parameter in model if parameter.requires_grad]
        for parameter in (*trained[:1], *trained[-1:]):
            found[id(parameter)] = parameter
    return list(found.values())
