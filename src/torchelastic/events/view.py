"""What the event logs of one machine say about a job. Pure: records in, a picture out.

The picture is as good as its sources: an agent sees its own node and every world; who joins and who
is lost between two worlds is seen by the leader, which may be on another machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

from torchelastic.events import types as events
from torchelastic.events.log import Record

NodeState = Literal[
    "starting", "joined", "running", "spare", "rejoining", "leaving", "lost", "ended", "died"
]
JobPhase = Literal["starting", "waiting", "running", "restarting", "ended", "died"]

_PLACED = ("running", "spare")
_TOO_FEW = "too few nodes"

#: Changes kept for `torchelastic status JOB`.
HISTORY = 50


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node of the job."""

    name: str
    state: NodeState
    #: The id of its agent, if that is on this machine.
    agent: str | None = None
    #: Wall clock of its agent's last event, if that is on this machine.
    last_seen: float | None = None
    leader: bool = False
    #: Whether its agent hosts the store that the nodes meet at.
    hosting: bool = False
    exitcode: int | None = None


@dataclass(frozen=True)
class Change:
    """Something that happened, and why."""

    wall: float
    what: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job as it stands."""

    job: str = ""
    phase: JobPhase = "starting"
    generation: int | None = None
    #: Workers in the world.
    size: int = 0
    #: Nodes of the world beyond those known by name: an agent is told of some of thousands.
    unnamed: int = 0
    restarts_used: int = 0
    min_nodes: int | None = None
    max_nodes: int | None = None
    #: Present nodes, and those lost since the world was formed, by name; world order first.
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    started: float | None = None
    #: When the last agent of this machine ended.
    ended: float | None = None
    exitcode: int | None = None
    #: The first failure that ended the job.
    cause: Mapping[str, Any] | None = None
    history: tuple[Change, ...] = ()

    @property
    def last_change(self) -> Change | None:
        return self.history[-1] if self.history else None

    def members(self) -> list[NodeView]:
        """The nodes of the world."""
        return [node for node in self.nodes.values() if node.state == "running"]


def fold(records: Iterable[Record]) -> JobView:
    """The picture after these records, which are in the order of time."""
    return reduce(_after, records, JobView())


def without(view: JobView, dead: Collection[str]) -> JobView:
    """The picture when the agents with these ids turn out to be gone without a last word."""
    nodes = {
        name: replace(node, state="died") if node.agent in dead and node.state != "ended" else node
        for name, node in view.nodes.items()
    }
    local = [node for node in nodes.values() if node.agent is not None]
    if local and view.ended is None and all(node.state in ("died", "ended") for node in local):
        return replace(view, nodes=nodes, phase="died")
    return replace(view, nodes=nodes)


def _after(view: JobView, record: Record) -> JobView:
    view = _seen(view, record)
    name = _name_of(view, record.node)
    match record.event:
        case events.AgentStarted(min_nodes=least, max_nodes=most):
            return _agent_started(view, record, least, most)
        case events.Joined(name=given, hosting=hosting):
            return _joined(view, record, given, hosting)
        case events.BecameLeader():
            nodes = {key: replace(node, leader=key == name) for key, node in view.nodes.items()}
            return replace(view, nodes=nodes)
        case events.NodeJoined(name=other):
            return _tell(_arrived(view, other), record, f"{other} joined")
        case events.NodeLost(name=other, reason=why):
            return _tell(_with(view, other, state="lost"), record, f"{other} was lost", why)
        case events.NodeLeaving(name=other, reason=why):
            return _tell(_with(view, other, state="leaving"), record, f"{other} leaves", why)
        case events.Leaving():
            return _with(view, name, state="leaving")
        case events.LeaseLost(reason=why):
            lost = _with(view, name, state="rejoining")
            return _tell(lost, record, f"{name} was given up by the others", why)
        case events.SignalReceived(signal=signal, action=action):
            return _tell(view, record, f"{name} got {signal}", action)
    return _after_generation_event(view, record, name)


def _after_generation_event(view: JobView, record: Record, name: str) -> JobView:
    generation = record.generation if record.generation is not None else -1
    match record.event:
        case events.WorldFormed() as formed:
            return _world_formed(view, record, formed)
        case events.GenerationOver(reason=why):
            over = replace(view, phase="restarting")
            return _tell(over, record, f"generation {generation} is over", why)
        case events.WorkersStopped() if view.phase == "running" and generation == view.generation:
            return replace(view, phase="restarting")
        case events.RestartDecided(restart=False, reason=why):
            return _tell(view, record, "the job is not restarted", why)
        case events.Waiting(reason=why):
            return _waits(view, record, why)
        case events.JobEnded() as ended:
            return _job_ended(view, record, name, ended)
    return view


def _agent_started(view: JobView, record: Record, least: int, most: int) -> JobView:
    started = view.started if view.started is not None else record.wall
    phase = "starting" if view.ended is not None else view.phase
    return replace(
        _with(view, _name_of(view, record.node), state="starting"),
        started=started,
        ended=None,
        exitcode=None,
        phase=phase,
        min_nodes=least,
        max_nodes=most,
    )


def _joined(view: JobView, record: Record, name: str, hosting: bool) -> JobView:
    """An agent has its name from now on; before, it went by its id."""
    nodes = dict(view.nodes)
    node = nodes.pop(_name_of(view, record.node))
    nodes[name] = replace(node, name=name, hosting=hosting, state="joined")
    return replace(view, nodes=nodes)


def _arrived(view: JobView, name: str) -> JobView:
    """The leader sees a member; its own agent, or a world, may have told already."""
    present = view.nodes.get(name)
    if present is not None and present.state not in ("lost", "starting", "rejoining"):
        return view
    return _with(view, name, state="joined")


def _world_formed(view: JobView, record: Record, formed: events.WorldFormed) -> JobView:
    if view.generation is not None and (record.generation or 0) <= view.generation:
        return view  # every agent of this machine tells of it
    places: dict[str, NodeState] = dict.fromkeys(formed.nodes, "running")
    places |= dict.fromkeys(formed.spares, "spare")
    nodes: dict[str, NodeView] = {}
    for name, state in places.items():
        known = view.nodes.get(name) or NodeView(name=name, state=state)
        nodes[name] = replace(known, state=state)
    for name, node in view.nodes.items():
        if name not in nodes and (node.agent is not None or node.state == "joined"):
            # Still here, but not in this world: it may come into the next one.
            nodes[name] = replace(node, state="joined") if node.state in _PLACED else node
    changed = replace(
        view,
        phase="running",
        generation=record.generation,
        size=formed.size,
        unnamed=max(0, formed.count - len(formed.nodes)),
        restarts_used=formed.restarts_used,
        nodes=nodes,
    )
    return _tell(changed, record, f"generation {record.generation} began", formed.reason)


def _waits(view: JobView, record: Record, why: str) -> JobView:
    """It is said again every minute; the history keeps the last time only."""
    last = view.last_change
    again = last is not None and last.what == _TOO_FEW
    history = view.history[:-1] if again else view.history
    return _tell(replace(view, phase="waiting", history=history), record, _TOO_FEW, why)


def _job_ended(view: JobView, record: Record, name: str, ended: events.JobEnded) -> JobView:
    view = _with(view, name, state="ended", exitcode=ended.exitcode)
    view = replace(view, cause=ended.cause or view.cause, exitcode=ended.exitcode)
    local = [node for node in view.nodes.values() if node.agent is not None]
    if all(node.state == "ended" for node in local):
        view = replace(view, phase="ended", ended=record.wall)
    return _tell(view, record, f"{name} ended with exit code {ended.exitcode}", ended.reason)


def _seen(view: JobView, record: Record) -> JobView:
    name = _name_of(view, record.node)
    present = view.nodes.get(name) or NodeView(name=name, state="starting", agent=record.node)
    nodes = {**view.nodes, name: replace(present, agent=record.node, last_seen=record.wall)}
    return replace(view, job=record.job, nodes=nodes)


def _name_of(view: JobView, agent: str) -> str:
    """The name of the node with this agent; its id while it has none."""
    found = (name for name, node in view.nodes.items() if node.agent == agent)
    return next(found, agent)


def _with(view: JobView, name: str, **changes: Any) -> JobView:
    present = view.nodes.get(name) or NodeView(name=name, state="joined")
    return replace(view, nodes={**view.nodes, name: replace(present, **changes)})


def _tell(view: JobView, record: Record, what: str, why: str = "") -> JobView:
    return replace(view, history=(*view.history, Change(record.wall, what, why))[-HISTORY:])
