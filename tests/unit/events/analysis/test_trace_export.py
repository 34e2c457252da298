import json

import pytest
from hypothesis import given, settings

from tests.support import SOAK
from tests.unit.events.stories import LOGS, Story
from torchelastic.cli.commands.trace import write
from torchelastic.events import types as events
from torchelastic.events.analysis.trace_export import trace

#: What Chrome's format asks of an entry, by its phase.
KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "s", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
META = {"process_name": str, "process_sort_index": int, "thread_name": str}
META |= {"thread_sort_index": int}


def checked(records) -> list[dict]:
    """The entries, after what the format says has been checked."""
    entries = json.loads(json.dumps(list(trace(records))))
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    for entry in entries:
        assert set(entry) == KEYS[entry["ph"]]
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        if entry["ph"] == "M":
            (value,) = entry["args"].values()
            assert isinstance(value, META[entry["name"]])
        elif entry["ph"] == "X":
            assert entry["dur"] >= 0
            assert (entry["pid"], entry["tid"]) in named
        else:
            assert entry["s"] in ("t", "p")
    check_nesting(entries)
    return entries


def check_nesting(entries) -> None:
    """Bars of one track either hold each other or do not touch: viewers draw nothing else."""
    tracks: dict[tuple[int, int], list] = {}
    for entry in entries:
        if entry["ph"] == "X":
            tracks.setdefault((entry["pid"], entry["tid"]), []).append(entry)
    for bars in tracks.values():
        open_ends: list[float] = []
        for bar in sorted(bars, key=lambda bar: (bar["ts"], -bar["dur"])):
            while open_ends and open_ends[-1] <= bar["ts"] + 0.01:
                open_ends.pop()
            end = bar["ts"] + bar["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.01
            open_ends.append(end)


def bars(entries, pid: int | None = None) -> list[tuple[str, float, float]]:
    """Name, begin and length in seconds."""
    return [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in entries
        if e["ph"] == "X" and pid in (None, e["pid"])
    ]


def killed() -> Story:
    story = Story().world(1, 0).workers_start(1, 0).world(1.5, 0).trains(2, 0, step=0)
    story.steps(3, 0, 1).steps(6, 0, 7).fails(6.5, 0).over(6.75, 0, reason="rank 2 was killed")
    return (
        story.world(7, 1, reason="rank 2 was killed")
        .trains(7.5, 1, step=7, fetched=0.25)
        .steps(8.5, 1, 8)
        .end(9)
    )


def test_a_job_is_drawn_with_names_that_people_know_and_its_failures_as_moments():
    entries = checked(killed().records)
    assert bars(entries, 1) == [
        ("generation 0", 1.0, 5.75),
        ("generation 1", 7.0, 2.0),
        ("failure: rank 2 was killed", 6.5, pytest.approx(1.5)),
        ("detect", 6.5, 0.25),
        ("agree", 6.75, 0.25),
        ("rebuild", 7.0, 0.25),
        ("transfer", 7.25, 0.25),
        ("redo", 7.5, 0.5),
    ]
    assert bars(entries, 2) == [
        ("step 0", 2.0, 1.0),
        ("steps 1 to 6", 3.0, 3.0),
        ("step 7", 7.5, 1.0),
        ("step 8", 8.5, 0.5),
    ]
    names = {e["args"]["name"] for e in entries if e["name"].endswith("_name")}
    assert {"job job", "node a", "node b", "rank 0", "rank 1", "generations"} <= names
    (failed,) = [e for e in entries if e["ph"] == "i" and e["name"] == "failure"]
    assert (failed["pid"], failed["tid"], failed["ts"]) == (3, 3, 6.5e6)
    assert failed["args"]["said"] == "rank 2 failed at step 7: killed by SIGKILL"


def test_a_failure_before_the_last_one_is_over_does_not_overlap_it():
    story = Story().world(0, 0).trains(0, 0, step=0)
    for step in range(1, 11):
        story.steps(step, 0, step)
    for generation in range(3):
        at = 11 + generation
        story.fails(at, generation).over(at, generation).world(at + 0.1, generation + 1)
        story.trains(at + 0.2, generation + 1, step=2)
    checked(story.records)


@settings(max_examples=30 * SOAK, deadline=None)
@given(LOGS)
def test_trace_of_any_log_keeps_the_format(records):
    checked(sorted(records, key=lambda record: record.time))


def test_the_file_is_json_with_the_entries_in_it(tmp_path):
    path = tmp_path / "trace.json"
    hostile = Story().tell(0, events.Note("\x1b]0;owned\x07</script>"), generation=None)
    hostile.tell(1, events.Joined('"\\\ud800</script>', "", False))
    assert write(path, trace(hostile.records)) == len(json.loads(path.read_text())["traceEvents"])
    assert write(path, []) == 0
    assert json.loads(path.read_text())["traceEvents"] == []
