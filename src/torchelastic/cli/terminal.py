"""Output and error messages of the commands."""

from __future__ import annotations

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


def refuse(prog: str, sentence: str) -> int:
    """Print why the command cannot run; return the exit code."""
    show(f"{prog}: error: {one_line(sentence)}", stream=sys.stderr)
    return EXIT_USAGE


def discard_output() -> None:
    """Discard further output after a `BrokenPipeError` (`| head`), so that no flush raises."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
