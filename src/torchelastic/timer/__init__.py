"""Worker process: timers that end a worker stuck in a block for too long. The API is 0.2's.

from torchelastic.timer import expires

with expires(after=60):  # under `torchelastic run` there is nothing else to do
    batch = next(batches)

Clients and servers for processes without an agent are torch's own, loaded when they are first used.
"""

from __future__ import annotations

import importlib

from torchelastic.timer.countdown import configure, expires

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torchelastic.timer.api import *  # noqa: F403
    from torchelastic.timer.file_based_local_timer import *  # noqa: F403
    from torchelastic.timer.local_timer import *  # noqa: F403

_HOME = {
    "api": "RequestQueue TimerClient TimerRequest TimerServer",
    "file_based_local_timer": "FileTimerClient FileTimerRequest FileTimerServer",
    "local_timer": "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue",
}
_MODULE = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = ["configure", "expires", *_MODULE]


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module 'torchelastic.timer' has no attribute '{name}'")
    module = importlib.import_module(f"torch.distributed.elastic.timer.{_MODULE[name]}")
    return getattr(module, name)
