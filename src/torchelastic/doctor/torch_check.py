"""The check of the torch that workers import."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from torchelastic import torch_versions
from torchelastic.doctor import child_process, torch_probe
from torchelastic.doctor.finding import Finding, fault, not_checked, ok, warning

CHECK = "torch"
#: Seconds: importing torch from a cold network file system is slow.
IMPORT_TIMEOUT = 90.0


@dataclass(frozen=True)
class Torch:
    """The result of `torch_probe`."""

    python: str
    torch: str
    place: str
    seconds: float
    #: `CUDA 13.0`; empty: for CPUs only.
    built_for: str
    nccl: str
    #: Why gloo does not work; empty: it does.
    gloo: str


def check(python: str, env: Mapping[str, str], *, gpus: int) -> list[Finding]:
    """Ask the Python that workers run with, in their environment."""
    # By path and with -P: a module next to the probe must not hide another one.
    ended = child_process.run([python, "-P", torch_probe.__file__], env, IMPORT_TIMEOUT)
    if ended.exitcode == 2:  # Python 3.10 has no -P
        ended = child_process.run([python, torch_probe.__file__], env, IMPORT_TIMEOUT)
    if ended.exitcode is None:
        return [
            not_checked(
                CHECK, f"Importing torch timed out after {IMPORT_TIMEOUT:g} s.", "Try again."
            )
        ]
    if ended.exitcode != 0:
        return [
            fault(
                CHECK,
                f"{python} cannot import torch ({ended.last_words}).",
                "Install torch there, or set PYTHON_EXEC to a Python that has it.",
            )
        ]
    found = Torch(**json.loads(ended.output.splitlines()[-1]))
    return judge(found, paths=env.get("PYTHONPATH", ""), gpus=gpus)


def judge(found: Torch, *, paths: str, gpus: int) -> list[Finding]:
    """Judge the torch that was found. Pure."""
    return [_version(found, paths), _gloo(found), *_nccl(found, gpus)]


def _version(found: Torch, paths: str) -> Finding:
    if reason := torch_versions.too_old(found.torch):
        return fault(CHECK, reason, "Install a newer version.")
    shadow = next((path for path in paths.split(os.pathsep) if _is_in(found.place, path)), None)
    if shadow is not None:
        return warning(
            CHECK,
            f"torch {found.torch} is imported from {shadow}, because of PYTHONPATH.",
            "Unset PYTHONPATH unless you want that one.",
        )
    if reason := torch_versions.too_new(found.torch):
        return warning(CHECK, reason, "")
    kind = found.built_for or "CPU only"
    return ok(
        CHECK,
        f"torch {found.torch} ({kind}) on Python {found.python}, imported in "
        f"{found.seconds:.1f} s.",
    )


def _gloo(found: Torch) -> Finding:
    if found.gloo:
        return fault(
            "gloo",
            f"gloo cannot create a process group ({found.gloo}).",
            "Check GLOO_SOCKET_IFNAME and /etc/hosts.",
        )
    return ok("gloo", "gloo can create a process group.")


def _nccl(found: Torch, gpus: int) -> list[Finding]:
    if not gpus:
        return []
    if not found.nccl:
        return [
            fault(
                "nccl",
                f"This machine has GPUs, but torch {found.torch} is built without NCCL.",
                "Install a torch that is built for these GPUs.",
            )
        ]
    return [ok("nccl", f"NCCL {found.nccl} with {found.built_for}; --gpu tests it.")]


def _is_in(place: str, directory: str) -> bool:
    return bool(directory) and place.startswith(os.path.abspath(directory) + os.sep)
