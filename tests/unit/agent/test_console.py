"""Output of the agent: a reader that does not read must not hold it up."""

import asyncio
import fcntl
import logging
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pytest

from tests.support import FakeClock
from tests.unit.agent.cast import in_loop
from torchelastic.agent.output import console
from torchelastic.agent.output.console import Console, WaitingLine, sentence
from torchelastic.agent.output.terminal_text import plain


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


def test_unread_console_is_bounded_and_does_not_delay_exit(pipe, monkeypatch):
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


def test_console_without_reader_drops_lines(pipe):
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


# --- What a job waits for, counted down in place -------------------------------------------------


class Screen:
    def __init__(self, *, is_terminal: bool = True) -> None:
        self.is_terminal = is_terminal
        self.drawn: list[str] = []

    def redraw(self, text: str) -> None:
        self.drawn.append(text)


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (None, "1 of 4 there"),
        (293.0, "1 of 4 there; for 4 min 53 s more"),
        (12.0, "1 of 4 there; for 12 s more"),
        (0.4, "1 of 4 there; any moment now"),
    ],
)
def test_how_long_still(left, text):
    assert sentence("1 of 4 there", left) == text


@in_loop
async def test_waiting_line_counts_down_and_is_cleared(monkeypatch):
    monkeypatch.setattr(console, "TICK", 0.0)
    screen, clock = Screen(), FakeClock(100.0)
    line = WaitingLine(screen, clock)
    assert line.show("1 of 4 there", 60.0)
    running = asyncio.create_task(line.run())
    await asyncio.sleep(0)
    clock.advance(10.0)
    while "1 of 4 there; for 50 s more" not in screen.drawn:
        await asyncio.sleep(0)
    running.cancel()
    line.clear()
    line.clear()
    assert screen.drawn[0] == "1 of 4 there; for 1 min more"
    assert screen.drawn.count("") == 1
    assert screen.drawn[-1] == ""


def test_waiting_line_restarts_countdown_for_new_text():
    screen, clock = Screen(), FakeClock()
    line = WaitingLine(screen, clock)
    line.show("1 of 4 there", 60.0)
    clock.advance(5.0)
    line.show("2 of 4 there", 55.0)
    line.show("warming up")
    assert screen.drawn == [
        "1 of 4 there; for 1 min more",
        "2 of 4 there; for 55 s more",
        "warming up",
    ]


def test_waiting_line_is_off_without_terminal():
    screen = Screen(is_terminal=False)
    line = WaitingLine(screen, FakeClock())
    assert not line.show("1 of 4 there", 60.0)
    asyncio.run(line.run())
    line.clear()
    assert screen.drawn == []


# ---  --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, with\ttabs\nand lines: äöü 漢字 🙂", None),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("over\rwritten", r"over\rwritten"),
        ("back\x08space\x7f", r"back\x08space\x7f"),
        ("nul\x00", r"nul\x00"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("a\u2028b\u2066c\u200f", r"a\u2028b\u2066c\u200f"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_terminal_sequences_are_escaped(text, shown):
    assert plain(text) == (text if shown is None else shown)
