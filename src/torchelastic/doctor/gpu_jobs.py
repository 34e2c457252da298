"""`doctor --gpu`: real jobs on the GPUs of this machine, one for each path that CUDA could break.

Each job is `torchelastic run` of `gpu_program`, with a time limit: agent, zygote, rendezvous,
stores and snapshots are the same as in any other job."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.doctor import child_process, gpu_program
from torchelastic.doctor.finding import Finding, Severity, fault, not_checked, ok

#: Seconds for a path: the first use of CUDA and NCCL is slow on a machine with many GPUs.
PATH_TIMEOUT = 180.0
#: Characters of each log file of a job in the report, at most.
_LOG_LIMIT = 20_000


@dataclass(frozen=True)
class GpuPath:
    """One path, and the job that tests it."""

    name: str
    what: str
    #: Fewest and most workers.
    least: int = 1
    most: int = 1
    #: `--max-restarts` of the job: for a path on which a worker is killed.
    restarts: int = 0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class PathResult:
    """The result of a path, with what the report shows of it."""

    finding: Finding
    seconds: float = 0.0
    #: What the worker raised, and the end of each log file of the job.
    traceback: str = ""
    logs: Mapping[str, str] = field(default_factory=dict)


PATHS = (
    GpuPath("zygote", "CUDA in a forked worker"),
    GpuPath("collective", "an all-reduce", most=8),
    GpuPath("abort", "aborting a group with a silent peer", least=2, most=8),
    GpuPath("train", "in-process recovery", least=2, most=8, restarts=3),
    GpuPath(
        "hang",
        "detection of a hung rank",
        least=2,
        most=8,
        restarts=3,
        flags=("--progress-timeout", "5"),
    ),
    GpuPath("snapshot", "restoring state from memory", restarts=1),
)


def take(
    way: GpuPath, device: str, devices: int, environ: Mapping[str, str], backend: str = ""
) -> PathResult:
    """Run the job of one path on `devices` devices, with the default back end of the device unless
    one is given."""
    check = f"{device} {way.name}"
    if devices < way.least:
        return PathResult(not_checked(check, f"{_capital(way.what)} needs {way.least} devices."))
    workers = min(devices, way.most)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchelastic-doctor-") as directory:
        command = _command(way, device, workers, directory, backend)
        # In an empty directory: with `-m`, Python imports from the working directory first.
        ended = child_process.run(command, _undisturbed(environ), PATH_TIMEOUT, cwd=directory)
        seconds = time.monotonic() - began
        noted = _read(Path(directory), way.name, workers)
        finding = judge(check, way.what, ended.exitcode, noted, seconds)
        if finding.verdict is not Severity.FAULT:
            return PathResult(finding, seconds)
        raised = Path(directory, f"{way.name}.traceback")
        logs = {"the agent": ended.errors[-_LOG_LIMIT:], **_logs(Path(directory, "logs"))}
        text = raised.read_text() if raised.exists() else ""
        return PathResult(finding, seconds, text, logs)


def overall(findings: Sequence[Finding]) -> str:
    """Return the verdict on all paths in one sentence. Pure."""
    broken = [finding.check for finding in findings if finding.verdict is Severity.FAULT]
    taken = sum(finding.verdict is not Severity.NOT_CHECKED for finding in findings)
    if broken:
        return f"{len(broken)} of {taken} GPU paths do not work: {', '.join(broken)}."
    if not taken:
        return "No GPU path was tested."
    return f"All {taken} tested GPU paths work."


@dataclass(frozen=True)
class WorkerNotes:
    """The notes of the workers; empty where they wrote none."""

    doing: str = ""
    found: str = ""
    broken: str = ""


def judge(
    check: str, what: str, exitcode: int | None, noted: WorkerNotes, seconds: float
) -> Finding:
    """Judge one path. Pure."""
    if noted.broken:
        return fault(check, f"{_capital(what)} does not work: {noted.broken}.", _ADVICE)
    if exitcode == 0 and noted.found:
        return ok(check, f"{_capital(noted.found)} ({seconds:.1f} s in all).")
    place = f" while {noted.doing}" if noted.doing else " before it started"
    if exitcode is None:
        return fault(
            check, f"{_capital(what)} hung: timed out in {PATH_TIMEOUT:g} s{place}.", _ADVICE
        )
    return fault(check, f"{_capital(what)} failed{place} with exit code {exitcode}.", _ADVICE)


_ADVICE = "Do not rely on it on this machine; please open an issue and attach the report."


def _command(way: GpuPath, device: str, workers: int, directory: str, backend: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torchelastic", "run", "--standalone"),
        *("--nproc-per-node", str(workers), "--max-restarts", str(way.restarts)),
        *("--shutdown-timeout", "3", "--log-dir", f"{directory}/logs", "--redirects", "3"),
        *way.flags,
        *("-m", gpu_program.__name__, way.name, "--device", device, "--notes", directory),
        *("--backend", backend),
    ]


def _undisturbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables that set flags of `run` or inject faults: they are meant for the launch
    that is planned."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("PET_") and name != "TORCHELASTIC_FAULTS"
    }


def _read(directory: Path, name: str, workers: int) -> WorkerNotes:
    notes, broken = directory / f"{name}.json", directory / f"{name}.broken"
    noted = json.loads(notes.read_text()) if notes.exists() else {}
    found, why = noted.get("found", ""), broken.read_text() if broken.exists() else ""
    if found and name == "hang" and not why:
        found, why = named(_hangs(directory), workers - 1)
    if len({file.read_text() for file in directory.glob(f"{name}.*.bits")}) > 1:
        why = "the ranks ended with different bits"
    return WorkerNotes(doing=noted.get("doing", ""), found=found, broken=why)


def named(hangs: Sequence[Mapping[str, Any]], sleeper: int) -> tuple[str, str]:
    """Return what was found of the hang of this rank, and what is wrong with it. Pure."""
    if not hangs:
        return "", "the hang was not detected"
    hang = hangs[0]
    if list(hang["missing"]) != [sleeper]:
        return "", f"rank {sleeper} slept, but the reported hang was: {hang['text']}"
    return f"the hang was detected: {hang['text']}", ""


def _hangs(directory: Path) -> list[dict[str, Any]]:
    files = directory.rglob("events.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event.get("type") == "hang"]


def _logs(directory: Path) -> dict[str, str]:
    """Return the end of each log file of the job, by its path in the directory."""
    return {
        str(file.relative_to(directory)): file.read_text(errors="replace")[-_LOG_LIMIT:]
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- the report -------------------------------------------------------------------------------

#: Variables in the report: settings of torch and NCCL, nothing about users or keys.
_REPORTED = ("NCCL_", "TORCH_", "CUDA_", "GLOO_", "PYTORCH_", "NVIDIA_VISIBLE_DEVICES", "OMP_")
#: Seconds for `nvidia-smi`.
_SMI_TIMEOUT = 30.0
_ASKED = (
    ("--query-gpu=index,name,driver_version,memory.total", "--format=csv"),
    ("topo", "-m"),
)


def write_report(
    version: str,
    environ: Mapping[str, str],
    findings: Sequence[Finding],
    taken: Sequence[PathResult],
) -> Path:
    """Write the report to the working or else the temporary directory; return its path."""
    name = time.strftime("torchelastic-doctor-%Y%m%d-%H%M%S.txt")
    content = report_text(version, platform.platform(), environ, _devices(environ), findings, taken)
    file = Path.cwd() / name
    try:
        file.write_text(content)
    except OSError:
        file = Path(tempfile.gettempdir(), name)
        file.write_text(content)
    return file


def _devices(environ: Mapping[str, str]) -> str:
    """Return the GPUs and their topology according to `nvidia-smi`."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return "nvidia-smi is not installed."
    ended = [child_process.run([program, *words], environ, _SMI_TIMEOUT) for words in _ASKED]
    return "\n\n".join((one.output or one.last_words).strip() for one in ended)


def report_text(
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
