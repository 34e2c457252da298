"""The names of 0.2's `multiprocessing`."""

from torchelastic.config import Std
from torchelastic.launcher.process_contexts import (
    MultiprocessContext,
    PContext,
    RunProcsResult,
    SubprocessContext,
    start_processes,
    to_map,
)
from torchelastic.launcher.process_failure import ProcessFailure

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
