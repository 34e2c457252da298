"""A module name of torch's."""

from torch.distributed.elastic.timer.file_based_local_timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
)

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
