"""A module name of 0.2's."""

from torch.distributed.elastic.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer

from torchelastic.timer.countdown import configure, expires

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
