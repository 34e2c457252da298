"""Command line: the entry points of torchrun, Bagua and torchelastic 0.2: `run`, `launch`.

Also the collectives of 0.1, for `State.sync`: `import torchelastic.distributed as edist`. They are
loaded on first use, so that the entry points start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.compat.collectives import (
        all_gather_return_max_long,
        broadcast_binary,
        broadcast_bool,
        broadcast_float_list,
        broadcast_long,
        broadcast_model,
        convert_to_distributed_tensor,
        convert_to_normal_tensor,
        get_rank,
        is_distributed_training_run,
    )

__all__ = [
    "all_gather_return_max_long",
    "broadcast_binary",
    "broadcast_bool",
    "broadcast_float_list",
    "broadcast_long",
    "broadcast_model",
    "convert_to_distributed_tensor",
    "convert_to_normal_tensor",
    "get_rank",
    "is_distributed_training_run",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'torchelastic.distributed' has no attribute '{name}'")
    return getattr(importlib.import_module("torchelastic.compat.collectives"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
