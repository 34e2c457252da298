"""Groups that torch makes by itself: those of NCCL, and of every other back end but gloo.

Their abort works, so there are no waits to own. But the host does not wait for their collectives, a
device does. After an abort the device goes on with whatever is in the tensors, and nothing raises:
gradients, a loss, a peer's state are garbage then. So before anything is written or counted as
done, the host waits for the device and asks whether all went well (`Group.settle`).

The watchdog of such a back end ends the process when a peer is lost, which is what survivors must
be spared (`spare_process`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import env, torch_backends, torch_private
from torchelastic.training.group.gloo import OwnedGloo

log = logging.getLogger(__name__)

#: What NCCL's watchdog does about an error: 1 and 3 end the process, 2 aborts the group only.
_ERROR_HANDLING, _ENDS_PROCESS, _ABORTS_GROUP = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "13", "2"


def spare_process() -> None:
    """Before a group is made: its watchdog is to abort it, and not to end the process."""
    if env.get(_ERROR_HANDLING, "3") in _ENDS_PROCESS:
        env.update({_ERROR_HANDLING: _ABORTS_GROUP})
    if not env.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", ""):
        env.update({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"})


def groups() -> list[Any]:
    """Those that there are now."""
    return [g for g in torch_private.groups() if not isinstance(g, OwnedGloo)]


def streams(native: Sequence[Any]) -> list[Any]:
    """Where the calling thread's operations are queued."""
    return [torch.get_device_module(device).current_stream() for device in _devices(native)]


def synchronize(native: Sequence[Any]) -> None:
    """Wait until their devices have done all that was launched, or an abort has ended it."""
    for device in _devices(native):
        torch.get_device_module(device).synchronize()


def is_busy(stream: Any) -> bool:
    """Whether something is under way there. Any thread; a plain host has no streams to ask."""
    query = getattr(stream, "query", None)
    return query is not None and not query()


def launched(native: Sequence[Any]) -> int | None:
    """How many collectives were launched in all of them; None where that is not counted."""
    try:
        return sum(map(torch_private.launched_in, native))
    except RuntimeError:
        return None


def failure(native: Sequence[Any]) -> str:
    """What their watchdogs have found; empty: nothing."""
    for group in native:
        backend = torch_private.backend_of(group, torch_backends.here(group))
        error = backend.get_error().name if hasattr(backend, "get_error") else "SUCCESS"
        if error != "SUCCESS":
            return f"{dist.get_backend(group)} says {error}"
    return ""


def abort(native: Sequence[Any]) -> None:
    """All of them, whatever one of them says."""
    for group in native:
        try:
            group.abort()
        except RuntimeError as error:
            log.warning("A group of %s cannot be aborted: %s", dist.get_backend(group), error)


def _devices(native: Sequence[Any]) -> set[str]:
    return {torch_backends.here(group) for group in native}
