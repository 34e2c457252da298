from __future__ import annotations

import pytest

from tests.unit.cli.test_status import Agent, trained
from torchelastic.cli.live import LivePicture
from torchelastic.cli.story import choose
from torchelastic.events import types as events
from torchelastic.events.log import EventLog, read_files
from torchelastic.events.view import fold


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_the_picture_is_that_of_all_records_at_any_time():
    agent = Agent("job")
    live = LivePicture(choose("job"))
    assert live.look().phase == "starting"
    agent.world(0, "node-a").tell(events.Training(0, 0, 0), 0)
    for step in range(1, 30):
        agent.tell(events.Progress([0, 1], [step] * 2, [agent.clock.now() + 1] * 2), 0)
        if step % 7 == 0:
            seen, expected = live.look(), fold(read_files([agent.log.path]))
            assert (seen.step, seen.rate, seen.nodes) == (step, expected.rate, expected.nodes)
    agent.end(0, "done")
    assert live.alive
    assert live.look() == fold(read_files([agent.log.path]))
    assert not live.alive
    live.close()


def test_lines_that_come_late_are_put_in_order():
    agent = Agent("job").world(0, "node-a", "node-b")
    live = LivePicture(choose("job"))
    agent.world(2, "node-a", reason="later")
    live.look()
    path = agent.log.path.with_name("job.jsonl")
    gathered = EventLog(path, job="job", node="id-node-b", clock=agent.clock)
    agent.clock.advance(-0.5)
    gathered.emit(events.GenerationOver("failure", "boom"), generation=0)
    gathered.close()
    seen = live.look()
    assert seen.phase == "running"
    assert [change.what for change in seen.history][-2:] == [
        "generation 0 is over",
        "generation 2 began",
    ]
    live.close()


def test_a_line_and_its_gathered_copy_are_one():
    agent = trained("job")
    live = LivePicture(choose("job"))
    before = live.look(now=0.0)
    path = agent.log.path.with_name("job.jsonl")
    gathered = EventLog(path, job="job", node="x", clock=agent.clock)
    for record in read_files([agent.log.path]):
        gathered.append(record.heard_at(record.mono))
    gathered.close()
    assert live.look(now=0.0) == before
    live.close()
