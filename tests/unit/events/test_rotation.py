"""A full log: bounded, and what matters is the last to go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchelastic.clock import FakeClock
from torchelastic.events import types as events
from torchelastic.events.log import EventLog, read
from torchelastic.events.rotation import lasting, rotate


def line(kind: str, number: int) -> bytes:
    return b'{"v":1,"type":"%b","number":%d}\n' % (kind.encode(), number)


NOTES = [line("note", number) for number in (1, 3, 4)]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(2 * len(NOTES[0]), NOTES[:2]), (1000, NOTES), (0, [])],
)
def test_what_lasts_is_the_first_that_has_room(most, expected):
    passing = [line("progress", 2), line("checkpoint-stored", 2)]
    lines = [NOTES[0], *passing, *NOTES[1:], b"half a li"]
    assert list(lasting(lines, most)) == expected


def test_a_device_is_never_renamed():
    rotate(Path(os.devnull), 10)
    assert Path(os.devnull).is_char_device()


def test_an_agents_own_log_keeps_what_matters_too(tmp_path):
    clock = FakeClock()
    log = EventLog(tmp_path / "events.jsonl", job="j", node="n", clock=clock, max_bytes=20_000)
    log.emit(events.AgentStarted(1, "", ["train.py"], 1, 1, 1))
    for number in range(1000):
        clock.advance(1.0)
        log.emit(events.Progress([0], [number], [clock.now()]), generation=0)
    log.emit(events.JobEnded(0, "done"))
    log.close()
    records = list(read(tmp_path / "events.jsonl"))
    assert [record.type for record in records if record.type != "progress"] == [
        "agent-started",
        "job-ended",
    ]
    steps = [record.event.steps[0] for record in records if record.type == "progress"]
    assert steps == list(range(steps[0], 1000)), "the latest, whole"
    assert steps[0] > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 50_000
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
