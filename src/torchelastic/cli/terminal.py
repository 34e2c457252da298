"""What reaches a terminal: no text of a user's can do more there than be read.

A job's name, an exception's message or a line of a log may hold sequences that move the cursor,
retitle the window or turn the direction of writing. They are shown, not obeyed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TextIO

from torchelastic.errors import EXIT_USAGE

#: Control characters but the end of a line and the tab; marks that turn the direction of writing
#: or end a line; halves of characters.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def plain(text: str) -> str:
    r"""The text with everything a terminal would act on written out.

    >>> plain("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """The same, in one line.

    >>> one_line("a\\nb")
    'a b'
    """
    return plain(" ".join(text.split("\n")).replace("\t", " "))


def show(text: str, *, stream: TextIO | None = None, flush: bool = True) -> None:
    """Print lines that may hold users' texts, also where the terminal lacks some characters."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    safe = plain(text).encode(encoding, errors="backslashreplace").decode(encoding)
    stream.write(f"{safe}\n")
    if flush:
        stream.flush()


def parser_for_a_job(command: str, description: str) -> argparse.ArgumentParser:
    """A command's, with the job that it is about as `job` and `id`."""
    parser = argparse.ArgumentParser(prog=f"torchelastic {command}", description=description)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="a job id or how one begins, or the --log-dir of a run (default: the job that runs)",
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
