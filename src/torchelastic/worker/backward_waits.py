"""How long a script waits for other workers, as far as that is seen from outside.

A script's collectives are torch's own: nobody tells us who waits in them, or for how long. But most
of the waiting is in one place. Gradients are ready when the backward has come to the first layer;
what passes from then until the optimizer is asked to take its step is, in the main, waiting for
those of the others. So the last moment is noted at which a gradient became ready, of two parameters
of each model, or of an optimizer: the first, which is usually the last to have one, and the last,
for models that list their layers in another order.

What is waited elsewhere, in a forward or between two steps, counts as the worker's own. All ranks
then seem to take as long as each other, and nobody is called slow who is not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from torchelastic.worker_counters import stalls


class BackwardWaits:
    """Costs a call for each gradient that is noted, and no system call."""

    def __init__(self, models: Iterable[Iterable[Any]]) -> None:
        """`models`: the parameters of each."""
        torch = sys.modules.get("torch")
        self._is_compiling = torch.compiler.is_compiling if torch is not None else lambda: False
        #: When the last gradient became ready since the last step of an optimizer, less what had
        #: been counted until then; None: none has.
        self._ready_at: float | None = None
        #: To be called no more.
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._ready)
            for parameter in _noted(models)
        ]

    def _ready(self, _: object) -> None:
        if not self._is_compiling():  # a whole backward, with no room for us
            self._ready_at = time.monotonic() - stalls.apart(stalls.seconds)

    def before_write(self) -> None:
        """An optimizer is about to take its step: what was to be waited for has come."""
        if self._ready_at is not None:
            now = time.monotonic() - stalls.apart(stalls.seconds)
            stalls.add(stalls.PEERS, now - self._ready_at)
            self._ready_at = None

    def committed(self) -> None:
        """The step is done; a gradient that no optimizer has taken up tells nothing of the next."""
        self._ready_at = None


def _noted(models: Iterable[Iterable[Any]]) -> list[Any]:
    """Each parameter once, though models may share some."""
    found: dict[int, Any] = {}
    for model in models:
        trained = [parameter for parameter in model if parameter.requires_grad]
        for parameter in (*trained[:1], *trained[-1:]):
            found[id(parameter)] = parameter
    return list(found.values())
