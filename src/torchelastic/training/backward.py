"""What C++ code of a backward asks for, and what is to be done before that code waits for it.

DDP's reducer launches its collectives in a backward, and waits for them in a callback that it has
the engine run at the end of the backward: in C++, and on whatever future it was given. A callback
that was queued before runs before. So whoever launches for the reducer queues a wait of its own,
and the reducer finds every collective done, or never gets that far.

What is relied upon in torch (tests/process/test_abort.py fails when a release changes it): the
reducer queues its callback after it has launched the last collective; callbacks run in the order in
which they were queued; what they raise, the backward raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_engine: Any = torch.autograd.Variable._execution_engine
_current_node: Callable[[], Any] = torch._C._current_autograd_node
#: The function that calls the engine; None if torch has another way to it, and `asks` is False.
_enter_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_ENTERS_ENGINE = getattr(_enter_engine, "__code__", None)

#: Have the engine call this at the end of the present backward.
at_end: Callable[[Callable[[], object]], None] = _engine.queue_callback


def asks() -> bool:
    """Whether the caller of our caller is C++ code in a node of a backward.

    Code of Python, a hook of the user's in a backward for one, has a frame of its own between the
    engine and us. With the graph done there is no node: what is queued then may come too late.
    """
    frame = sys._getframe(2)
    return frame.f_code is _ENTERS_ENGINE and _current_node() is not None
