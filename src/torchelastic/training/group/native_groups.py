"""Groups that torch makes itself: those of NCCL, and of every other backend but gloo.

Their abort works, so we need no waits for them. But the device waits for their collectives, not the
host. After an abort the device continues with whatever is in the tensors, and nothing raises:
gradients, a loss, a peer's state are garbage then. So before anything is written or counted as
done, the host waits for the device and checks for errors (`Group.check_collectives`).

The watchdog of such a backend ends the process when a peer is lost. Survivors must live on, so we
turn that off (`spare_process`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from torchelastic import env, torch_backends, torch_private
from torchelastic.training.group.gloo import OwnedGloo

log = logging.getLogger(__name__)

#: How NCCL's watchdog handles an error: 1 and 3 end the process, 2 only aborts the group.
_ERROR_HANDLING, _ENDS_PROCESS, _ABORTS_GROUP = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "13", "2"


def spare_process() -> None:
    """Make the watchdog of later groups abort the group instead of ending the process."""
    if env.get(_ERROR_HANDLING, "3") in _ENDS_PROCESS:
        env.update({_ERROR_HANDLING: _ABORTS_GROUP})
    if not env.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", ""):
        env.update({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"})


def groups() -> list[Any]:
    """Return the native groups that exist now."""
    return [g for g in torch_private.groups() if not isinstance(g, OwnedGloo)]


def streams(native: Sequence[Any]) -> list[Any]:
    """Return the streams that queue the calling thread's operations."""
    return [torch.get_device_module(device).current_stream() for device in _devices(native)]


def synchronize(native: Sequence[Any]) -> None:
    """Wait until their devices have finished everything launched, or an abort has ended it."""
    for device in _devices(native):
        torch.get_device_module(device).synchronize()


def is_busy(stream: Any) -> bool:
    """Return whether a stream has unfinished work. Any thread; a CPU has no streams."""
    query = getattr(stream, "query", None)
    return query is not None and not query()


def launched(native: Sequence[Any]) -> int | None:
    """Return the number of collectives launched in all of them, or None if not counted."""
    try:
        return sum(map(torch_private.launched_in, native))
    except RuntimeError:
        return None


def failure(native: Sequence[Any]) -> str:
    """Return the first error that a watchdog found, or an empty string."""
    for group in native:
        backend = torch_private.backend_of(group, _device(group))
        error = backend.get_error().name if hasattr(backend, "get_error") else "SUCCESS"
        if error != "SUCCESS":
            return f"{group.name()} reports {error}"
    return ""


def abort(native: Sequence[Any]) -> None:
    """Abort all of them, even if one fails."""
    for group in native:
        try:
            group.abort()
        except RuntimeError as error:
            log.warning("Could not abort a process group of %s: %s", group.name(), error)


def _devices(native: Sequence[Any]) -> set[str]:
    return {_device(group) for group in native}


def _device(group: Any) -> str:
    """Return where a group's tensors are. Torch knows no backend of groups that we made."""
    if torch_private.name_of_group(group):
        return torch_backends.here(group)
    return torch_private.device_types_of(group)[0]
