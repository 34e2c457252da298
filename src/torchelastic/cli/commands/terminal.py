"""What commands about a job have in common: how they speak, and what they are asked."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TextIO

from torchelastic.agent.output.terminal_text import one_line, plain
from torchelastic.errors import EXIT_USAGE


def show(text: str, *, stream: TextIO | None = None, flush: bool = True) -> None:
    """Print lines that may hold users' texts, also where the terminal lacks some characters."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    safe = plain(text).encode(encoding, errors="backslashreplace").decode(encoding)
    stream.write(f"{safe}\n")
    if flush:
        stream.flush()


def parser_for_a_job(
    command: str, description: str, default: str = "the job that runs"
) -> argparse.ArgumentParser:
    """A command's, with the job that it is about as `job` and `id`."""
    parser = argparse.ArgumentParser(prog=f"torchelastic {command}", description=description)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help=f"a job id or how one begins, or the --log-dir of a run (default: {default})",
    )
    parser.add_argument("--job", dest="id", metavar="ID", help="which job of a directory is meant")
    return parser


def refuse(command: str, error: Exception) -> int:
    """Say what is wrong; returns the exit code."""
    show(f"torchelastic {command}: {one_line(str(error))}", stream=sys.stderr)
    return EXIT_USAGE


def nobody_reads() -> None:
    """After a `BrokenPipeError` (`| head`): let the interpreter's last flush not raise another."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
