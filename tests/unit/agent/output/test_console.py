"""What the agent says must not hold it up, whoever does not read it."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pytest

from torchelastic.agent.output import console
from torchelastic.agent.output.console import Console


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The smallest there is: a page."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def read_until(read_end: int, last: bytes) -> bytes:
    data = b""
    while not data.endswith(last):
        data += os.read(read_end, 4096)
    return data


def test_a_line_is_there_at_once_and_needs_no_thread(pipe):
    read_end, write_end = pipe
    words = Console(write_end)
    words.setFormatter(logging.Formatter("[agent] %(message)s"))
    words.handle(logging.LogRecord("x", logging.INFO, "", 0, "it %s", ("begins",), None))
    assert os.read(read_end, 100) == b"[agent] it begins\n"
    forged = "refused.\n[agent] all is well"
    words.handle(logging.LogRecord("x", logging.INFO, "", 0, "%s", (forged,), None))
    assert os.read(read_end, 100) == b"[agent] refused.\n  [agent] all is well\n"
    assert words._writer is None
    assert not words.is_terminal
    words.redraw("1 of 2")
    words.say("said")
    assert os.read(read_end, 100) == b"said\n", "in a pipe nothing is drawn"


def test_users_texts_are_read_and_not_obeyed(pipe, capsys):
    read_end, write_end = pipe
    Console(write_end).say("ValueError: \x1b]0;title\x07\x1b[2J\r\x9b\u202e\n\tat: here \ud800")
    expected = r"ValueError: \x1b]0;title\x07\x1b[2J\r\x9b\u202e" + "\n\tat: here \\ud800\n"
    assert os.read(read_end, 200).decode() == expected
    console.show("\x1b[31mred")  # where nothing is set up to speak through
    assert capsys.readouterr().err == "\\x1b[31mred\n"


def test_a_reader_that_waits_gets_everything_in_its_order(pipe):
    read_end, write_end = pipe
    words = Console(write_end)
    lines = [f"{number}: " + "x" * 100 for number in range(1000)]
    for line in lines:
        words.say(line)
    wanted = "".join(line + "\n" for line in lines).encode()
    assert read_until(read_end, b"999: " + b"x" * 100 + b"\n") == wanted
    words.drain(60)
    assert words._writer is None
    words.say("and at once again")
    assert os.read(read_end, 100) == b"and at once again\n"


def test_what_nobody_reads_is_bounded_and_its_end_is_not_waited_for(pipe, monkeypatch):
    read_end, write_end = pipe
    monkeypatch.setattr(console, "MOST_BYTES", 10_000)
    words = Console(write_end)
    for _ in range(100):
        words.say("x" * 999)
    words.drain(0.01)
    data = read_until(read_end, b"stderr was not read.)\n")
    shown = data.count(b"\n") - 1
    assert data.endswith(b"(%d lines omitted: stderr was not read.)\n" % (100 - shown))
    words.drain(60)


def test_who_is_gone_or_was_never_there_costs_nothing(pipe):
    read_end, write_end = pipe
    words = Console(write_end)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, read_end)
    words.say("to nobody")
    assert words._writer is None
    os.close(nothing)
    words = Console(nothing)
    words.say("to nobody")
    words.redraw("1 of 2")
    assert not words.is_terminal


def test_a_report_comes_after_earlier_messages(pipe):
    read_end, write_end = pipe
    words = Console(write_end)
    logger = logging.getLogger("torchelastic")
    logger.addHandler(words)
    try:
        logger.error("first")
        console.show("then")
    finally:
        logger.removeHandler(words)
    assert os.read(read_end, 100) == b"first\nthen\n"


# --- a line that is drawn over -------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


def test_a_status_line_is_redrawn_after_each_message(terminal):
    ours, theirs = terminal
    words = Console(theirs)
    words.setFormatter(logging.Formatter("[agent] %(message)s"))
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 20, 0, 0))
    assert words.is_terminal
    words.redraw("100% of 2")
    words.redraw("\x1b]\nof")
    words.say("said")
    words.redraw("much longer than that")
    words.redraw("")
    words.redraw("")
    words.say("end")
    blank = " " * len("[agent] 100% of 2")
    assert read_until(ours, b"end\r\n").decode() == (
        f"[agent] 100% of 2\r{blank}\r[agent] \\x1b] of\r{' ' * 16}\rsaid\r\n"
        f"[agent] much longer\r{' ' * 19}\rend\r\n"
    )
