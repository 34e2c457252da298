"""The view of a job, folded from its event records. Pure.

`torchelastic status`, its JSON, `top` and the dashboard all show this view. It is as complete as
its logs: an agent knows its own node and every world; only the leader's log has the events of all
agents, and sees nodes join and get lost between two worlds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torchelastic.events import types as events
from torchelastic.events.analysis.bad_steps import BadSteps, BadStepView
from torchelastic.events.analysis.goodput import Goodput, GoodputFold
from torchelastic.events.analysis.last_failure import Failures, FailureView
from torchelastic.events.analysis.ranks import Ranks, RankView
from torchelastic.events.analysis.recoveries import Recoveries, Recovery, RecoveryTotals
from torchelastic.events.analysis.series import Curves, Point
from torchelastic.events.record import Record
from torchelastic.events.timeline import Generation, Phase, Timeline

NodeState = Literal[
    "starting", "joined", "running", "spare", "rejoining", "leaving", "lost", "ended", "died"
]
JobPhase = Literal["starting", "waiting", "running", "restarting", "ended", "died"]

_PLACED = ("running", "spare")
_NO_WORLD = "no world yet"
_PHASES: dict[Phase, JobPhase] = {
    "starting": "starting",
    "waiting": "waiting",
    "forming": "restarting",
    "entering": "running",
    "training": "running",
    "over": "restarting",
    "ended": "ended",
}

#: Changes that are kept.
HISTORY_LIMIT = 50


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node of the job."""

    name: str
    state: NodeState
    #: The id of its agent, if there are events of it.
    agent: str | None = None
    #: Wall clock of its agent's last event.
    last_seen: float | None = None
    leader: bool = False
    #: Its agent hosts the rendezvous.
    hosting: bool = False
    exitcode: int | None = None
    #: Why it is held out, if it is; empty once the job has ended.
    held: str = ""


@dataclass(frozen=True)
class HistoryEntry:
    """A change of the job, and why."""

    wall: float
    what: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class WorldView:
    """A world: its nodes, its time, and why it started and ended."""

    generation: int
    #: Names in rank order; `count` is the number of all nodes.
    nodes: tuple[str, ...]
    count: int
    size: int
    began: float
    why: str
    ended: float | None = None
    end_kind: str = ""
    end_why: str = ""
    #: The number of workers in a replica; 0: the model is not sharded.
    replica: int = 0

    @classmethod
    def of(cls, generation: Generation) -> WorldView:
        world = generation.world
        return cls(
            generation=generation.number,
            nodes=tuple(world.nodes),
            count=generation.nodes,
            size=world.size,
            began=generation.wall,
            why=world.reason,
            ended=generation.ended_wall,
            end_kind=generation.kind if generation.over is not None else "",
            end_why=generation.ended_why,
            replica=world.replica,
        )


@dataclass(frozen=True, kw_only=True)
class StoredView:
    """The last checkpoint in storage."""

    #: Wall clock of when it was stored.
    wall: float
    step: int
    #: How long it took to write, and its bytes.
    seconds: float
    size: int


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The state of a job."""

    job: str = ""
    phase: JobPhase = "starting"
    generation: int | None = None
    #: Workers in the world.
    size: int = 0
    #: Workers in a replica; 0: the model is not sharded.
    replica: int = 0
    #: Nodes of the world whose names are unknown: an agent knows only some of thousands.
    unnamed: int = 0
    restarts_used: int = 0
    min_nodes: int | None = None
    max_nodes: int | None = None
    #: Present nodes, and those lost since the world was formed, by name; world order first.
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    started: float | None = None
    #: When the last known agent ended.
    ended: float | None = None
    exitcode: int | None = None
    #: The last failure, even if the job recovered from it.
    failure: FailureView | None = None
    history: tuple[HistoryEntry, ...] = ()
    #: The furthest step a worker entered, and steps per second; None: unknown. The rate of a
    #: running job is 0 if the step in flight is overdue.
    step: int | None = None
    rate: float | None = None
    #: Wall clock of when the last step was entered.
    stepped: float | None = None
    ranks: tuple[RankView, ...] = ()
    #: Current stragglers; and the seconds lost to all stragglers so far.
    stragglers: tuple[events.Straggler, ...] = ()
    straggler_seconds: float = 0.0
    #: The oldest first.
    worlds: tuple[WorldView, ...] = ()
    #: The last ones, and the totals of all.
    recoveries: tuple[Recovery, ...] = ()
    recovery_totals: RecoveryTotals = field(default_factory=RecoveryTotals)
    goodput: Goodput | None = None
    #: Steps per second over the whole job, in a bounded number of points.
    rates: tuple[Point, ...] = ()
    #: The metrics that the script reported, by name, likewise.
    metrics: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    #: The last value of each metric; None: not finite.
    reported: Mapping[str, float | None] = field(default_factory=dict)
    #: Samples that all workers have trained with; None: not counted.
    samples: int | None = None
    checkpoint: StoredView | None = None
    #: The last hash of the weights, with a fixed batch.
    weights: events.WeightsHashed | None = None
    #: The last steps with bad numbers, and the number of all.
    bad_steps: tuple[BadStepView, ...] = ()
    bad_steps_total: int = 0

    @property
    def last_change(self) -> HistoryEntry | None:
        return self.history[-1] if self.history else None

    @property
    def last_recovery(self) -> Recovery | None:
        """The last recovery from a failure."""
        return next((one for one in reversed(self.recoveries) if one.is_failure), None)

    def members(self) -> list[NodeView]:
        """Return the known nodes of the world."""
        return [node for node in self.nodes.values() if node.state == "running"]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        # Thousands of points are plain already and need not be copied one by one.
        data = asdict(replace(self, goodput=None, rates=(), metrics={}))
        data["rates"] = list(self.rates)
        data["metrics"] = {name: list(points) for name, points in self.metrics.items()}
        data["nodes"] = list(data["nodes"].values())
        data["recoveries"] = [recovery.to_json() for recovery in self.recoveries]
        data["goodput"] = self.goodput.to_json() if self.goodput is not None else None
        return data


def fold(records: Iterable[Record]) -> JobView:
    """Return the view after these records, which are in the order of time."""
    folded = JobFold()
    for record in records:
        folded.feed(record)
    return folded.view()


def without(view: JobView, dead: Collection[str]) -> JobView:
    """Return the view, given that the agents with these ids were killed."""
    nodes = {
        name: _with_state(node, "died") if node.agent in dead and node.state != "ended" else node
        for name, node in view.nodes.items()
    }
    local = [node for node in nodes.values() if node.agent is not None]
    if local and view.ended is None and all(node.state in ("died", "ended") for node in local):
        return replace(view, nodes=_let_in(nodes), phase="died")
    return replace(view, nodes=nodes)


def _with_state(node: NodeView, state: NodeState) -> NodeView:
    return replace(node, state=state, held=node.held if state == "spare" else "")


def _let_in(nodes: Mapping[str, NodeView]) -> dict[str, NodeView]:
    """Clear `held`: in a job that has ended, no node is held out."""
    return {name: replace(node, held="") if node.held else node for name, node in nodes.items()}


class JobFold:
    """Folds a job's records, one by one in the order of time, into a view.

    The cost of a record depends neither on the length of the log nor on the number of nodes; only a
    new world and a view cost in proportion to the nodes.
    """

    def __init__(self) -> None:
        self._view = JobView()
        self._nodes: dict[str, NodeView] = {}
        #: Node names by agent id.
        self._names: dict[str, str] = {}
        self._history: deque[HistoryEntry] = deque(maxlen=HISTORY_LIMIT)
        self.timeline = Timeline()
        self._goodput = GoodputFold(self.timeline)
        self._recoveries = Recoveries(self.timeline, self._goodput)
        self._ranks = Ranks(self.timeline)
        self._failures = Failures()
        self._bad_steps = BadSteps()
        self._curves = Curves(self.timeline, self._ranks)
        self._last: Record | None = None

    def feed(self, record: Record) -> None:
        """Take one more record."""
        self._last = record
        self.timeline.feed(record)
        self._recoveries.feed(record)
        self._goodput.feed(record)
        self._ranks.feed(record)
        self._failures.feed(record)
        self._bad_steps.feed(record)
        self._curves.feed(record)
        self._seen(record)
        self._take(record, self._names[record.node])

    def view(self, now: float | None = None) -> JobView:
        """Return the view; for a running job, with goodput up to `now` (wall clock)."""
        passed = now - self._last.wall if now is not None and self._last is not None else 0.0
        until = self._last.time + max(0.0, passed) if self._last is not None else None
        live = until if now is not None else None
        current = self.timeline.current
        return replace(
            self._view,
            phase=_PHASES[self.timeline.phase],
            generation=current.number if current.number >= 0 else None,
            size=current.world.size,
            replica=current.world.replica,
            unnamed=max(0, current.nodes - len(current.world.nodes)),
            restarts_used=current.world.restarts_used,
            nodes=dict(self._nodes),
            history=tuple(self._history),
            step=self._ranks.step,
            rate=self._ranks.rate(live),
            stepped=self._ranks.stepped,
            ranks=self._ranks.views(self._names, live),
            stragglers=tuple(self._ranks.stragglers.values()),
            straggler_seconds=round(self._ranks.lost, 6),
            worlds=tuple(map(WorldView.of, self.timeline.generations)),
            recoveries=self._recoveries.views(),
            recovery_totals=self._recoveries.totals(),
            failure=self._failures.view(),
            goodput=self._goodput.at(until) if until is not None else None,
            rates=self._curves.rates,
            metrics=self._curves.metrics,
            reported=dict(self._curves.reported),
            samples=self._curves.samples,
            bad_steps=self._bad_steps.views,
            bad_steps_total=self._bad_steps.total,
        )

    # --- records ---------------------------------------------------------------------------------

    def _take(self, record: Record, name: str) -> None:
        match record.event:
            case events.AgentStarted(min_nodes=least, max_nodes=most):
                self._agent_started(record, name, least, most)
            case events.Joined(name=given, hosting=hosting):
                self._joined(record, given, hosting)
            case events.BecameLeader():
                self._leads(name)
            case events.LeaderFound(name=other):
                self._leads(other)
            case events.NodeJoined(name=other):
                self._arrived(other)
                self._tell(record, f"{other} joined")
            case events.NodeLost(name=other, reason=why):
                self._set(other, state="lost")
                self._tell(record, f"{other} was lost", why)
            case events.NodeLeaving(name=other, reason=why):
                self._set(other, state="leaving")
                self._tell(record, f"{other} is leaving", why)
            case events.Leaving():
                self._set(name, state="leaving")
            case events.LeaseLost(reason=why):
                self._set(name, state="rejoining")
                self._tell(record, f"{name} lost its lease", why)
            case events.SignalReceived(signal=signal, action=action):
                self._tell(record, f"{name} received {signal}", action)
            case events.CheckpointStored() as stored:
                self._checkpoint_stored(record, stored)
            case events.WeightsHashed() as hashed:
                self._change(weights=hashed)
            case events.JobEnded() as ended:
                self._job_ended(record, name, ended)
            case _:
                self._take_of_world(record)

    def _take_of_world(self, record: Record) -> None:
        if self.timeline.began:
            current = self.timeline.current
            self._place(current.world)
            self._tell(record, f"generation {current.number} began", current.world.reason)
        match record.event:
            case events.GenerationOver(reason=why):
                self._tell(record, f"generation {record.generation} ended", why)
            case events.RestartDecided(restart=False, reason=why):
                self._tell(record, "the job is not restarted", why)
            case events.Straggler(text=text, again=False):
                self._tell(record, text)
            case events.Waiting(reason=why):
                self._waits(record, why)

    def _agent_started(self, record: Record, name: str, least: int, most: int) -> None:
        started = self._view.started
        self._set(name, state="starting")
        self._change(
            started=started if started is not None else record.wall,
            ended=None,
            exitcode=None,
            min_nodes=least,
            max_nodes=most,
        )

    def _checkpoint_stored(self, record: Record, stored: events.CheckpointStored) -> None:
        wall = record.wall - (record.mono - stored.at)
        self._change(
            checkpoint=StoredView(
                wall=wall, step=stored.step, seconds=stored.seconds, size=stored.size
            )
        )

    def _joined(self, record: Record, name: str, hosting: bool) -> None:
        """Name a node, which had its agent's id as its name before."""
        node = self._nodes.pop(self._names[record.node])
        self._names[record.node] = name
        self._nodes[name] = replace(node, name=name, hosting=hosting, state="joined")

    def _leads(self, name: str) -> None:
        for key, node in self._nodes.items():
            if node.leader or key == name:
                self._nodes[key] = replace(node, leader=key == name)

    def _arrived(self, name: str) -> None:
        """Add a member that the leader sees, unless it is known already."""
        present = self._nodes.get(name)
        if present is None or present.state in ("lost", "starting", "rejoining"):
            self._set(name, state="joined")

    def _place(self, formed: events.WorldFormed) -> None:
        """Update the nodes: the world's come first; others without events are gone."""
        states: dict[str, NodeState] = dict.fromkeys(formed.nodes, "running")
        states |= dict.fromkeys(formed.spares, "spare")
        nodes: dict[str, NodeView] = {}
        for name, state in states.items():
            known = self._nodes.get(name) or NodeView(name=name, state=state)
            nodes[name] = replace(known, state=state, held=formed.held.get(name, ""))
        for name, node in self._nodes.items():
            heard = node.agent is not None and node.state != "lost"
            if name not in nodes and (heard or node.state == "joined"):
                # Still here, but not in this world: it may join the next one.
                nodes[name] = _with_state(node, "joined") if node.state in _PLACED else node
        self._nodes = nodes

    def _waits(self, record: Record, why: str) -> None:
        """Note that the job waits. Repeated every minute; the history keeps only the last."""
        if self._history and self._history[-1].what == _NO_WORLD:
            self._history.pop()
        self._tell(record, _NO_WORLD, why)

    def _job_ended(self, record: Record, name: str, ended: events.JobEnded) -> None:
        self._set(name, state="ended", exitcode=ended.exitcode)
        self._change(exitcode=ended.exitcode)
        if not self.timeline.agents:
            self._nodes = _let_in(self._nodes)
            self._change(ended=record.wall)
        self._tell(record, f"{name} ended with exit code {ended.exitcode}", ended.reason)

    # --- small changes ---------------------------------------------------------------------------

    def _seen(self, record: Record) -> None:
        name = self._names.setdefault(record.node, record.node)
        present = self._nodes.get(name) or NodeView(name=name, state="starting")
        self._nodes[name] = replace(present, agent=record.node, last_seen=record.wall)
        if self._view.job != record.job:
            self._change(job=record.job)

    def _set(self, name: str, state: NodeState, **changes: Any) -> None:
        present = self._nodes.get(name) or NodeView(name=name, state="joined")
        self._nodes[name] = replace(_with_state(present, state), **changes)

    def _change(self, **changes: Any) -> None:
        self._view = replace(self._view, **changes)

    def _tell(self, record: Record, what: str, why: str = "") -> None:
        self._history.append(HistoryEntry(record.wall, what, why))
