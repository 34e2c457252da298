"""Worker process: timers that end a worker stuck in a block for too long. The API is 0.2's.

from torchelastic.timer import expires

with expires(after=60):  # under `torchelastic run` there is nothing else to do
    batch = next(batches)

Clients and servers for processes without an agent are torch's own, loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchelastic.timer.countdown import configure, expires

if TYPE_CHECKING:
    from torchelastic.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer
    from torchelastic.timer.file_based_local_timer import (
        FileTimerClient,
        FileTimerRequest,
        FileTimerServer,
    )
    from torchelastic.timer.local_timer import (
        LocalTimerClient,
        LocalTimerServer,
        MultiprocessingRequestQueue,
    )

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'torchelastic.timer' has no attribute '{name}'")
    home = {"File": "file_based_local_timer", "Loca": "local_timer", "Mult": "local_timer"}
    module = importlib.import_module(f"torchelastic.timer.{home.get(name[:4], 'api')}")
    return getattr(module, name)
