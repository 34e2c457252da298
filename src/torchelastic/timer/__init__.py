"""Worker process: timers that end a worker stuck in a block for too long. The API is 0.2's.

from torchelastic.timer import expires

with expires(after=60):  # under `torchelastic run` there is nothing else to do
    batch = next(batches)
"""

from torchelastic.timer.countdown import configure, expires
from torchelastic.timer.file_based_local_timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
)
from torchelastic.timer.queue_timers import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
)
from torchelastic.timer.timer_requests import RequestQueue, TimerClient, TimerRequest
from torchelastic.timer.timer_server import TimerServer

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
