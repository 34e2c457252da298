"""The view of a running job equals that of all its records."""

import os

from tests.unit.cli.cast import Agent, trained
from torchelastic.events import types as events
from torchelastic.events.analysis.find_job import JobLogs, choose
from torchelastic.events.analysis.follow import Follower
from torchelastic.events.analysis.live_view import LiveView
from torchelastic.events.analysis.view import fold
from torchelastic.events.log import EventLog, read, read_files


def collected(agent: Agent, records=()) -> EventLog:
    """The log that a leader has collected, beside the agent's own log."""
    path = agent.log.path.with_name("job.jsonl")
    log = EventLog(path, job="job", node="id-node-b", clock=agent.clock)
    for record in sorted(records, key=lambda record: record.mono):
        log.append(record.heard_at(record.mono))
    return log


def test_the_picture_is_that_of_all_records_at_any_time():
    agent = Agent("job")
    live = LiveView(choose("job"))
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
    live = LiveView(choose("job"))
    agent.world(2, "node-a", reason="later")
    live.look()
    agent.clock.advance(-0.5)
    late = collected(agent)
    late.emit(events.GenerationOver("failure", "boom"), generation=0)
    late.close()
    seen = live.look()
    assert seen.phase == "running"
    assert [change.what for change in seen.history][-2:] == [
        "generation 0 ended",
        "generation 2 began",
    ]
    live.close()


def test_a_line_and_its_gathered_copy_are_one():
    agent = trained("job")
    live = LiveView(choose("job"))
    before = live.look(now=0.0)
    collected(agent, read(agent.log.path)).close()
    assert live.look(now=0.0) == before
    live.close()


def test_the_story_of_nodes_that_were_not_heard_before_is_put_in_its_place(monkeypatch):
    """This node leads now: what others did minutes ago is told here from the beginning."""
    agent = Agent("job").world(0, "node-a", "node-b")
    other = EventLog(agent.log.path.with_name("b"), job="job", node="b", clock=agent.clock)
    other.emit(events.AgentStarted(1, "", ["train.py"], 1, 4, 2))
    other.emit(events.Joined("node-b", "", False))
    other.emit(events.Progress([2, 3], [5, 5], [agent.clock.now()] * 2), generation=0)
    for _ in range(100):
        agent.tell(events.Note("time passes"))
    live = LiveView(choose("job"))
    assert live.look().nodes["node-b"].agent is None
    told = collected(agent, [*read(agent.log.path), *read(other.path)])
    told.close()
    monkeypatch.setattr("torchelastic.events.analysis.live_view._READ_AGAIN", 0.0)
    seen = live.look(now=0.0)
    assert seen == fold(read_files([told.path, agent.log.path]))
    assert seen.nodes["node-b"].agent == "b"
    assert live.look(now=0.0) == seen
    live.close()
    other.close()


def test_the_lines_of_another_job_in_the_directory_are_not_taken(tmp_path):
    agent = Agent("job").world(0, "node-a")
    live = LiveView(JobLogs(where=agent.log.path.parent))
    stranger = EventLog(agent.log.path, job="other", node="z", clock=agent.clock)
    stranger.emit(events.Note("of another job"))
    stranger.close()
    agent.tell(events.Note("of this one"))
    assert live.look().job == "job"
    assert [record.fields["text"] for _, record in live.latest()[-1:]] == ["of this one"]
    live.close()


# --- growing files -------------------------------------------------------------------------------


def lines(follower: Follower, *paths) -> list[bytes]:
    return [line for _, line in follower.new_lines(paths)]


def test_a_line_is_read_once_and_when_it_is_whole(tmp_path):
    path, follower = tmp_path / "log", Follower()
    assert lines(follower, path) == []
    path.write_bytes(b"one\ntw")
    assert lines(follower, path) == [b"one"]
    assert lines(follower, path) == []
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert lines(follower, path) == [b"two"]
    assert follower.unfinished() == [(path, b"three")]
    follower.close()


def test_follower_skips_lines_already_known(tmp_path):
    path, follower = tmp_path / "log", Follower()
    path.write_bytes(b"one\n")
    follower.skip([path, tmp_path / "none"])
    with path.open("ab") as file:
        file.write(b"two\n")
    assert lines(follower, path) == [b"two"]
    follower.close()


def test_a_file_that_is_rotated_away_is_read_to_its_end_first(tmp_path):
    path, follower = tmp_path / "log", Follower()
    path.write_bytes(b"one\n")
    assert lines(follower, path) == [b"one"]
    with path.open("ab") as file:
        file.write(b"two\n")
    os.replace(path, tmp_path / "log.1")
    path.write_bytes(b"three\n")
    found = [line for _ in range(3) for line in lines(follower, path)]
    assert found == [b"two", b"three"]
    follower.close()
