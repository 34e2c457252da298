"""Count this machine's devices without importing torch, which would take seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from torchelastic.errors import ConfigError


def workers_for(asked: int | str, environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return the number of workers for `--nproc-per-node`; /dev and /sys are under `root`."""
    if isinstance(asked, int):
        return asked
    if asked == "cpu":
        return cpus()
    if asked == "auto":
        return gpus(environ, root) or cpus()
    found = gpus(environ, root) if asked == "gpu" else xpus(root)
    if not found:
        raise ConfigError(
            f"--nproc-per-node {asked}: this machine has no {asked.upper()}. Write a number of "
            "workers, or cpu."
        )
    return found


def cpus() -> int:
    """Count the CPUs this process may run on, as torchrun does."""
    return len(os.sched_getaffinity(0))


def gpus(environ: Mapping[str, str], root: Path) -> int:
    """Count the CUDA or ROCm devices that workers will see."""
    present = _nvidia(root)
    if present:
        return _visible(present, environ.get("CUDA_VISIBLE_DEVICES"))
    listed = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    identities = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    amd = sum(identity.read_text().strip() not in ("", "0") for identity in identities)
    return _visible(amd, listed)


def xpus(root: Path) -> int:
    """Count the Intel graphics devices."""
    vendors = root.glob("sys/class/drm/renderD*/device/vendor")
    return sum(vendor.read_text().strip() == "0x8086" for vendor in vendors)


def _nvidia(root: Path) -> int:
    known_to_driver = sum(1 for _ in root.glob("proc/driver/nvidia/gpus/*"))
    # Containers often hide the driver's directory, and may have only some of the devices.
    devices = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in root.glob("dev/nvidia*"))
    return devices or known_to_driver


def _visible(present: int, listed: str | None) -> int:
    """Count the devices that a *_VISIBLE_DEVICES variable leaves of `present` ones.

    As in the driver, the list ends at the first invalid entry, and an empty list hides all devices.
    """
    if listed is None or not present:
        return present
    count = 0
    for entry in listed.split(","):
        entry = entry.strip()
        is_index = entry.isdigit() and int(entry) < present
        if not is_index and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count
