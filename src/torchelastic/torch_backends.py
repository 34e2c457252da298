"""Backends of torch.distributed: the only place that knows any of them by name.

Everything else follows from a backend's capabilities. Names say little: in torch 2.15 `nccl` is
another implementation than before, and `nccl2`, `nccl-lazy` and `nccl-legacy` are NCCL as well.
"""

from __future__ import annotations

import torch.distributed as dist

#: The one whose operations the host itself performs, and whose groups `torchelastic.train` makes.
HOST = "gloo"


def device_of(backend: str) -> str:
    """Return the device for tensors of this backend's collectives: the CPU if supported.

    >>> device_of("gloo"), device_of("nccl"), device_of("cpu:gloo,cuda:nccl")
    ('cpu', 'cuda', 'cpu')
    """
    devices: set[str] = set()
    for part in backend.lower().split(","):
        device, mixed, _ = part.partition(":")
        # torch knows some of NCCL's names only when they are used; other back ends register theirs.
        default = ["cuda" if part.startswith("nccl") else "cpu"]
        devices.update([device] if mixed else dist.Backend.backend_capability.get(part, default))
    return "cpu" if "cpu" in devices else min(devices)


def here(group: dist.ProcessGroup | None = None) -> str:
    """Return the device for a group's collectives; by default of the default group."""
    return device_of(dist.get_backend(group))


def is_on_host(backend: str) -> bool:
    """Return whether waiting for a small collective does not wait for a device."""
    return backend == HOST
