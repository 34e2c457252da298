"""A module name of 0.2's."""

from torchelastic.timer.countdown import configure, expires
from torchelastic.timer.timer_requests import RequestQueue, TimerClient, TimerRequest
from torchelastic.timer.timer_server import TimerServer

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
