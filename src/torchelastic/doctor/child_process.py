"""Run a program with a time limit, and make sure that it is gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.system import die_with_owner

#: Seconds between SIGTERM and SIGKILL when the time is up.
TERMINATE_TIMEOUT = 10.0
#: Bytes of its output that are read, at most.
_OUTPUT_LIMIT = 1 << 20


@dataclass(frozen=True)
class ProgramResult:
    """The exit code, None if it timed out, and the output."""

    exitcode: int | None
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        """The last line it wrote to standard error."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run(
    command: Sequence[str], env: Mapping[str, str], limit: float, cwd: str | None = None
) -> ProgramResult:
    """Run a program to its end, or for `limit` seconds; it dies with this thread."""
    guarded = [sys.executable, "-I", "-S", die_with_owner.__file__, str(os.getpid()), *command]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        # Files, not pipes: its children may outlive it for a moment and hold a pipe open.
        process = subprocess.Popen(
            guarded, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        exitcode = _wait(process, limit)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(_OUTPUT_LIMIT).decode(errors="replace"))
    return ProgramResult(exitcode, *texts)


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(TERMINATE_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None
