"""Hooks into backwards: calls before one begins and after it, and waits before its C++ code waits.

`before_next` holds functions to call when the next backward that adds to gradients begins, `after`
those to call after each. When first needed, we wrap autograd's engine, as Python knows it, in our
own class.

DDP's reducer launches its collectives in a backward, and waits for them in a callback that the
engine runs at the end of the backward: in C++, on whatever future it was given. Callbacks run in
the order in which they were queued. So code that launches a collective for the reducer (it `asks`)
queues its own wait first (`at_end`), and the reducer finds every collective done, or never gets
that far.

We rely on this behaviour of torch (tests/process/test_abort.py fails when a release changes it):
the reducer queues its callback after it has launched the last collective; callbacks run in the
order in which they were queued; the backward raises what they raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torchelastic import torch_private
from torchelastic.torch_private import at_end_of_backward as at_end
from torchelastic.torch_private import current_node

__all__ = ["after_each", "asks", "at_end", "before_next", "watch"]

#: Functions to call once, when the next backward begins, by the key of the caller.
before_next: dict[int, Callable[[], object]] = {}
#: Methods to call when a backward has ended without an error, as long as their objects live.
_after: list[WeakMethod[Callable[[], object]]] = []


class _Watched(torch_private.Engine):  # type: ignore[misc]
    """Autograd's engine, with our calls before each backward."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if before_next and kwargs.get("accumulate_grad", True):
            for call in [*before_next.values()]:
                call()
            before_next.clear()
        found = super().run_backward(*args, **kwargs)
        if _after and kwargs.get("accumulate_grad", True) and current_node() is None:
            for known in _after:
                if (ended := known()) is not None:
                    ended()
        return found


def watch(key: int, call: Callable[[], object]) -> None:
    """Call this when the next backward begins, unless it is removed from `before_next`."""
    torch_private.use_engine(_Watched)
    before_next[key] = call


def after_each(method: Callable[[], object]) -> None:
    """Call a method after each backward that adds to gradients; their reduction is done then."""
    torch_private.use_engine(_Watched)
    _after[:] = [*(one for one in _after if one() is not None), WeakMethod(method)]


def asks() -> bool:
    """Return whether our caller was called by C++ code in a node of a backward.

    Python code, such as a user's hook in a backward, has its own frame between the engine and us.
    When the graph is done there is no node: a callback queued then may run too late.
    """
    return sys._getframe(2).f_code in _ENTERS_ENGINE and current_node() is not None


#: The functions that call the engine. If torch's function is not known, `asks` is False.
_ENTERS_ENGINE = (torch_private.RUN_BACKWARD, _Watched.run_backward.__code__)
