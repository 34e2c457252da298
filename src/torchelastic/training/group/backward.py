"""Backwards: what is to be done before one begins, and before C++ code of one waits.

`before_next` holds what is to be called when the next backward that adds to gradients begins. For
that the engine, as Python knows it, is put into a class of ours, when first needed.

DDP's reducer launches its collectives in a backward, and waits for them in a callback that it has
the engine run at the end of the backward: in C++, and on whatever future it was given. A callback
that was queued before runs before. So whoever launches for the reducer (it `asks`) queues a wait of
its own (`at_end`), and the reducer finds every collective done, or never gets that far.

What is relied upon in torch (tests/process/test_abort.py fails when a release changes it): the
reducer queues its callback after it has launched the last collective; callbacks run in the order in
which they were queued; what they raise, the backward raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torchelastic import torch_private
from torchelastic.torch_private import at_end_of_backward as at_end
from torchelastic.torch_private import current_node

__all__ = ["asks", "at_end", "before_next", "watch"]

#: What is called once, when the next backward begins; by the key of who wants it.
before_next: dict[int, Callable[[], object]] = {}


class _Watched(torch_private.Engine):  # type: ignore[misc]
    """The engine."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if before_next and kwargs.get("accumulate_grad", True):
            for call in [*before_next.values()]:
                call()
            before_next.clear()
        return super().run_backward(*args, **kwargs)


def watch(key: int, call: Callable[[], object]) -> None:
    """Have this called when the next backward begins, unless it is taken out of `before_next`."""
    torch_private.use_engine(_Watched)
    before_next[key] = call


def asks() -> bool:
    """Whether the caller of our caller is C++ code in a node of a backward.

    Code of Python, a hook of the user's in a backward for one, has a frame of its own between the
    engine and us. With the graph done there is no node: what is queued then may come too late.
    """
    return sys._getframe(2).f_code in _ENTERS_ENGINE and current_node() is not None


#: The functions that call the engine. Without torch's, if it has another, `asks` is False.
_ENTERS_ENGINE = (torch_private.RUN_BACKWARD, _Watched.run_backward.__code__)
