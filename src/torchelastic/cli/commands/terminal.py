"""Shared parts of the commands about a job: output, error messages and the JOB argument."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TextIO

from torchelastic.agent.output.terminal_text import one_line, plain
from torchelastic.errors import EXIT_USAGE


def show(text: str, *, stream: TextIO | None = None, flush: bool = True) -> None:
    """Print text that may contain user text; escape characters that the terminal cannot show."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    safe = plain(text).encode(encoding, errors="backslashreplace").decode(encoding)
    stream.write(f"{safe}\n")
    if flush:
        stream.flush()


def parser_for_a_job(
    command: str, description: str, default: str = "the running job, or else the last one"
) -> argparse.ArgumentParser:
    """Return a command's parser, with the arguments `job` and `id` that select a job."""
    parser = argparse.ArgumentParser(prog=f"torchelastic {command}", description=description)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help=f"a job id, the beginning of one, or the --log-dir of a run (default: {default})",
    )
    parser.add_argument(
        "--job", dest="id", metavar="ID", help="which job, if JOB is a directory of several"
    )
    return parser


def refuse(command: str, error: Exception) -> int:
    """Print the error; return the exit code."""
    show(f"torchelastic {command}: {one_line(str(error))}", stream=sys.stderr)
    return EXIT_USAGE


def nobody_reads() -> None:
    """Discard further output after a `BrokenPipeError` (`| head`), so that no flush raises."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
