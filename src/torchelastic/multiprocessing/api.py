"""A module name of 0.2's."""

from torchelastic.config import Std
from torchelastic.multiprocessing.contexts import (
    MultiprocessContext,
    PContext,
    RunProcsResult,
    SubprocessContext,
    to_map,
)

__all__ = [
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "Std",
    "SubprocessContext",
    "to_map",
]
