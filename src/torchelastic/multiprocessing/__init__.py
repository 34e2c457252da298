"""Groups of processes without an agent, as 0.2 has them, and what failed ones leave (`errors`)."""

from torchelastic.config import Std
from torchelastic.multiprocessing.contexts import (
    MultiprocessContext,
    PContext,
    RunProcsResult,
    SubprocessContext,
    start_processes,
    to_map,
)
from torchelastic.multiprocessing.errors import ProcessFailure

__all__ = [
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]
