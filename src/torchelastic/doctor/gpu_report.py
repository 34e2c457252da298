"""The report of `doctor --gpu`: one file to attach to an issue."""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchelastic.doctor import child_process
from torchelastic.doctor.finding import Finding
from torchelastic.doctor.gpu_jobs import PathResult, overall

#: Variables in the report: settings of torch and NCCL, nothing about users or keys.
_REPORTED = ("NCCL_", "TORCH_", "CUDA_", "GLOO_", "PYTORCH_", "NVIDIA_VISIBLE_DEVICES", "OMP_")
#: Seconds for `nvidia-smi`.
_SMI_TIMEOUT = 30.0
_ASKED = (
    ("--query-gpu=index,name,driver_version,memory.total", "--format=csv"),
    ("topo", "-m"),
)


def write(
    version: str,
    environ: Mapping[str, str],
    findings: Sequence[Finding],
    taken: Sequence[PathResult],
) -> Path:
    """Write the report to the working or else the temporary directory; return its path."""
    name = time.strftime("torchelastic-doctor-%Y%m%d-%H%M%S.txt")
    content = text(version, platform.platform(), environ, gpus(environ), findings, taken)
    file = Path.cwd() / name
    try:
        file.write_text(content)
    except OSError:
        file = Path(tempfile.gettempdir(), name)
        file.write_text(content)
    return file


def gpus(environ: Mapping[str, str]) -> str:
    """Return the GPUs and their topology according to `nvidia-smi`."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return "nvidia-smi is not installed."
    ended = [child_process.run([program, *words], environ, _SMI_TIMEOUT) for words in _ASKED]
    return "\n\n".join((one.output or one.last_words).strip() for one in ended)


def text(
    version: str,
    system: str,
    environ: Mapping[str, str],
    devices: str,
    findings: Sequence[Finding],
    taken: Sequence[PathResult],
) -> str:
    """Return the whole report. Pure."""
    settings = [
        f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(_REPORTED)
    ]
    parts = [
        f"torchelastic {version} on {system}",
        f"## Result\n\n{overall([one.finding for one in taken])}",
        "## Paths\n\n" + "\n".join(map(_line, taken)),
        f"## GPUs\n\n{devices}",
        "## This machine\n\n"
        + "\n".join(f"{one.verdict.value:11}  {one.check}: {one.found}" for one in findings),
        "## Variables\n\n"
        + ("\n".join(settings) or "No variables of torch, NCCL or CUDA are set."),
        *(_details(one) for one in taken if one.traceback or one.logs),
    ]
    return "\n\n".join(parts) + "\n"


def _line(one: PathResult) -> str:
    finding = one.finding
    return f"{finding.verdict.value:11}  {finding.check} ({one.seconds:.1f} s): {finding.found}"


def _details(one: PathResult) -> str:
    logs = [f"--- {name}\n{content.rstrip()}" for name, content in one.logs.items() if content]
    raised = one.traceback.rstrip() or "No worker raised an exception."
    return "\n\n".join([f"## {one.finding.check}\n\n{raised}", *logs])
