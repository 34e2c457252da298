"""Stories of jobs for tests: records in the order of time, told by hand."""

from hypothesis import strategies as st

from torchelastic.events import types as events
from torchelastic.events.failure import Failure
from torchelastic.events.record import Record
from torchelastic.events.types import Event


def failure(**changes) -> Failure:
    facts = {"generation": 0, "node": "b", "rank": 2, "local_rank": 0, "pid": 42, "exitcode": -9}
    return Failure(**(facts | {"message": "killed by SIGKILL", "step": 7} | changes))


def record(at: float, event: Event | None, node: str = "n", **more) -> Record:
    """A record `at` so many seconds; of a later version's type without an event."""
    told = {"type": event.type if event is not None else "later-type", "generation": None}
    times = {"wall": 1000 + at, "mono": 100 + at}
    return Record(**told | {"job": "job", "node": node, "event": event} | times | more)


class Story:
    """The logs of the agents of nodes a, b, …; node a leads. Times are seconds from its start."""

    def __init__(self, *, nodes: str = "ab", most: int = 2, workers: int = 1) -> None:
        self.records: list[Record] = []
        self.workers = workers
        for name in nodes:
            self.tell(0, events.AgentStarted(1, "a:1", ["t.py"], 1, most, workers), by=name)
            self.tell(0, events.Joined(name, "a:1", name == "a"), by=name)

    def tell(self, at: float, event: Event, *, by: str = "a", generation: int | None = None):
        self.records.append(record(at, event, f"id-{by}", generation=generation))
        return self

    def world(self, at: float, generation: int, names: str = "ab", reason: str = "it begins"):
        size = len(names) * self.workers
        formed = events.WorldFormed(list(names), size, "a:2", reason, 0)
        return self.tell(at, formed, generation=generation)

    def workers_start(self, at: float, generation: int, names: str = "ab"):
        for place, name in enumerate(names):
            ranks = list(range(place * self.workers, (place + 1) * self.workers))
            started = events.WorkersStarted(ranks, [90 + rank for rank in ranks], 0.01)
            self.tell(at, started, by=name, generation=generation)
        return self

    def trains(self, at: float, generation: int, step: int, **more: float):
        return self.tell(at, events.Training(0, step, 0, **more), generation=generation)

    def steps(self, at: float, generation: int, step: int, *, entered: float | None = None, **more):
        """Node a tells that its rank 0 has entered this step, just now or at another time."""
        when = 100 + (at if entered is None else entered)
        before = more.pop("before", None)
        progress = events.Progress([0], [step], [when], more.pop("stalls", {}), before=before)
        return self.tell(at, progress, generation=generation, **more)

    def over(self, at: float, generation: int, kind: str = "failure", reason: str = "boom"):
        return self.tell(at, events.GenerationOver(kind, reason), generation=generation)

    def fails(self, at: float, generation: int, *, by: str = "b", **changes):
        told = failure(generation=generation, **changes).to_json()
        return self.tell(at, events.WorkerFailed(told), by=by, generation=generation)

    def end(self, at: float, names: str = "ab", exitcode: int = 0, reason: str = "done"):
        for name in names:
            self.tell(at, events.JobEnded(exitcode, reason), by=name)
        return self


# --- any log, for hypothesis ---------------------------------------------------------------------

_GENERATIONS = st.integers(-1, 3)
_STEPS = st.integers(-1, 30)
_SECONDS = st.floats(0, 50, allow_nan=False)
_KINDS = st.sampled_from(
    ["failure", "error", "node-failure", "resize", "leave", "finished", "stop"]
)
_STALLS = st.dictionaries(
    st.sampled_from(["data", "checkpoint", "snapshot", "restore", "x"]), _SECONDS
)
_EVENTS = st.one_of(
    st.just(events.AgentStarted(1, "", [], 1, 3, 1)),
    st.builds(events.Joined, st.sampled_from("abc"), st.just(""), st.booleans()),
    st.builds(events.NodeJoined, st.sampled_from("abc")),
    st.builds(events.NodeLost, st.sampled_from("abc"), st.just("")),
    st.builds(events.Waiting, st.just(2), st.just([]), st.just("")),
    st.builds(
        events.WorldFormed, st.sampled_from([["a"], ["a", "b"]]), *map(st.just, (2, "", "", 0))
    ),
    st.builds(events.GenerationOver, _KINDS, st.just("")),
    st.just(events.WorkersStarted([0], [1], 0.1)),
    st.just(events.WorkersStopped(0.1)),
    st.just(events.WorkerFailed(failure().to_json())),
    st.builds(events.WorkerExited, *map(st.just, (0, 0, 1, 0)), _SECONDS),
    st.builds(events.Training, st.just(0), _STEPS, st.just(0), _SECONDS, _SECONDS),
    st.builds(
        events.Progress,
        st.just([0, 1]),
        st.lists(_STEPS),
        st.lists(_SECONDS, max_size=3),
        _STALLS,
        before=st.sampled_from([None, -1, 0, 7]),
    ),
    st.builds(
        events.StepSkipped,
        st.integers(0, 1),
        _STEPS,
        *map(st.just, ("bad", "nan", None, 0.0)),
        st.booleans(),
        st.sampled_from(["skip", "retry", "stop"]),
        st.just([{"epoch": 0, "ids": [1, 2], "size": 2, "span": [0, 4]}]),
    ),
    st.just(events.JobEnded(0, "")),
    st.just(events.Note("")),
)
_ENTRIES = st.lists(
    st.tuples(st.floats(-0.5, 5, allow_nan=False), _EVENTS, st.sampled_from("abc"), _GENERATIONS),
    max_size=40,
)


def _log(entries) -> list[Record]:
    story, now = Story(nodes=""), 0.0
    for passed, event, node, generation in entries:
        now = max(0.0, now + passed)
        story.tell(now, event, by=node, generation=None if generation < 0 else generation)
    return story.records


LOGS = _ENTRIES.map(_log)
