"""What a job waits for, counted down in place."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.agent.support import in_loop
from torchelastic.agent.output import console
from torchelastic.agent.output.console import WaitingLine, sentence
from torchelastic.clock import FakeClock


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
async def test_it_counts_by_its_own_clock_and_goes_when_it_is_over(monkeypatch):
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


def test_what_is_said_again_begins_its_own_countdown():
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


def test_where_there_is_no_terminal_nothing_is_drawn_and_nobody_runs():
    screen = Screen(is_terminal=False)
    line = WaitingLine(screen, FakeClock())
    assert not line.show("1 of 4 there", 60.0)
    asyncio.run(line.run())
    line.clear()
    assert screen.drawn == []
