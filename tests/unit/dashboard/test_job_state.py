"""The job as it stands, as bytes."""

import gzip
import json
import os
import zlib
from dataclasses import replace

import pytest

from tests.unit.cli.cast import Agent
from torchelastic.dashboard.job_state import (
    PACKED_HEAD,
    STILL_HERE,
    JobState,
    StateReader,
    encoded,
    packed,
    state_of,
)
from torchelastic.events import types as events
from torchelastic.events.analysis.find_job import JobLogs, choose
from torchelastic.events.analysis.view import JobView, NodeView, WorldView

HOSTILE = "<script>alert(1)</script>\r\n\r\nevent: x\ndata: \u2028\x1b[2J\ud800 ]]>"


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def agent():
    return Agent("job").world(0, "node-a")


def read(reader):
    made = reader.look()
    return made.number, json.loads(made.body)


def test_a_picture_has_the_view_and_the_last_events(agent):
    reader = StateReader(choose("job"), node="id-node-a", clock=lambda: 2e9)
    number, told = read(reader)
    assert number == 1
    assert (told["now"], told["live"], told["node"], told["whole"]) == (2e9, True, "node-a", True)
    assert told["view"]["generation"] == 0
    assert told["log"][-1]["type"] == "world-formed"
    assert told["log"][-1]["node"] == "node-a"
    assert told["log"][-1]["text"].startswith("world formed with ")
    reader.close()


def test_job_state_is_rebuilt_only_after_a_change(agent):
    now = 2e9
    reader = StateReader(choose("job"), clock=lambda: now)
    first = reader.look()
    assert reader.look() is first
    agent.tell(events.Note("news"))
    second = reader.look()
    assert second.number == 2
    assert json.loads(second.body)["log"][-1]["text"] == "news"
    now += 6  # its time passes, though nothing happens
    assert reader.look().number == 3
    agent.end(0, "done")
    ended = reader.look()
    assert (ended.number, ended.live) == (4, False)
    now += 600
    assert reader.look() is ended
    reader.close()


def test_the_log_has_the_last_fifty_events_and_no_steps(agent):
    for number in range(80):
        agent.tell(events.Note(f"note {number}"))
        agent.tell(events.Progress([0], [number], [agent.clock.now()]), 0)
        agent.clock.advance(1)
    reader = StateReader(choose("job"))
    for _ in range(2):
        texts = [line["text"] for line in read(reader)[1]["log"]]
        assert texts == [f"note {number}" for number in range(30, 80)]
        agent.tell(events.Progress([0], [100], [agent.clock.now()]), 0)
    reader.close()


def test_a_directory_of_a_job_that_has_ended_is_enough(agent):
    agent.end(3, "boom")
    story = JobLogs(where=agent.log.path)
    reader = StateReader(story)
    _, told = read(reader)
    assert (told["live"], told["node"], told["view"]["exitcode"]) == (False, None, 3)
    reader.close()


def view(*nodes, count=None):
    names = tuple(node.name for node in nodes if node.state == "running")
    world = WorldView(
        generation=0, nodes=names, count=count or len(names), size=8, began=0.0, why=""
    )
    return JobView(nodes={node.name: node for node in nodes}, worlds=(world,) if nodes else ())


def test_whose_view_it_is():
    me = NodeView(name="a", state="running", agent="1")
    joined = NodeView(name="c", state="joined", agent="3")  # heard, though no world names it
    leader = NodeView(name="b", state="running", leader=True)
    cases = [
        (view(), None, True),
        (view(me), None, True),
        (view(replace(me, leader=True)), "a", True),
        (view(me, leader), "b", False),
        (view(me, NodeView(name="b", state="lost")), None, True),
        (view(me, count=2), None, False),
        (view(me, joined, count=2), None, True),
    ]
    for seen, leads, whole in cases:
        told = state_of(seen, [], 0.0, live=True, agent="1")
        assert (told["leader"], told["whole"]) == (leads, whole), seen
        assert told["node"] == ("a" if seen.nodes else None), seen


def test_hostile_text_is_data_in_one_line(agent):
    agent.tell(events.Note(HOSTILE))
    agent.world(1, HOSTILE, reason=HOSTILE)
    reader = StateReader(choose("job"))
    made = reader.look()
    assert made.body.isascii()
    assert b"\n" not in made.body
    assert b"\r" not in made.body
    assert made.frame.count(b"\n\n") == 1
    assert made.frame.startswith(b"event: picture\nid: 1\ndata: {")
    assert json.loads(made.body)["view"]["nodes"][0]["name"] == HOSTILE
    reader.close()


def test_numbers_that_json_has_not_are_null():
    data = {"a": [1.5, float("nan")], "b": {"c": float("-inf")}, "d": (float("inf"), "x")}
    assert json.loads(encoded(data)) == {"a": [1.5, None], "b": {"c": None}, "d": [None, "x"]}


def test_packed_pictures_need_none_of_those_before():
    """A reader that skips some unpacks the others."""
    frames = [JobState.of(n, {"text": "the same again " * 50}, live=True) for n in range(5)]
    for chosen in (frames, frames[::2], frames[3:]):
        stream = PACKED_HEAD + b"".join(one.packed for one in chosen) + packed(STILL_HERE)
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        assert unpacker.decompress(stream) == b"".join(one.frame for one in chosen) + STILL_HERE
    assert gzip.compress(b"")[:3] == PACKED_HEAD[:3]


def test_a_log_that_cannot_be_read_comes_back(agent):
    """Rotated away, or a disk that is gone for a moment: the picture stays as it was."""
    reader = StateReader(choose("job"))
    first = reader.look()
    os.rename(agent.log.path, f"{agent.log.path}.gone")
    assert reader.look().body == first.body
    reader.close()
