"""What can happen in a job, one type each. A `type` name is part of the file format: it stays.

`docs/reference/events.md` is made from this file: the docstrings, the fields and the comments above
them.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import Any, ClassVar, Literal

#: Version of the line format. Readers skip lines of a version they do not know.
SCHEMA = 1

Json = Mapping[str, Any]


class Event:
    """Base of all events."""

    type: ClassVar[str]

    def fields(self) -> dict[str, Any]:
        """The event's own part of its line."""
        return {name: getattr(self, name) for name in _field_names(type(self))}


# --- an agent's life -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentStarted(Event):
    """An agent begins."""

    type: ClassVar[str] = "agent-started"
    pid: int
    #: Where the nodes of the job are to meet; empty: on this machine.
    endpoint: str
    #: What the workers run.
    command: Sequence[str]
    min_nodes: int
    max_nodes: int
    #: Workers on this node.
    nproc: int


@dataclass(frozen=True)
class ZygoteReady(Event):
    """Workers can be forked warm from now on."""

    type: ClassVar[str] = "zygote-ready"
    #: From its start.
    seconds: float


@dataclass(frozen=True)
class ZygoteUnavailable(Event):
    """Workers are started as plain processes."""

    type: ClassVar[str] = "zygote-unavailable"
    reason: str


@dataclass(frozen=True)
class Joined(Event):
    """This node has met the others."""

    type: ClassVar[str] = "joined"
    #: The node's name for people.
    name: str
    #: Address of the store they meet at.
    endpoint: str
    #: Whether this agent hosts that store.
    hosting: bool


@dataclass(frozen=True)
class LeaseLost(Event):
    """The store has given this node up; it stops its workers and joins anew."""

    type: ClassVar[str] = "lease-lost"
    reason: str


@dataclass(frozen=True)
class SignalReceived(Event):
    """Somebody sent the agent a signal."""

    type: ClassVar[str] = "signal-received"
    #: As in `SIGTERM`.
    signal: str
    #: What the agent does about it.
    action: str


@dataclass(frozen=True)
class Leaving(Event):
    """This node announces its departure."""

    type: ClassVar[str] = "leaving"
    reason: str


@dataclass(frozen=True)
class Note(Event):
    """Something worth knowing that changes nothing."""

    type: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class JobEnded(Event):
    """The last line of an agent: how the job ended for this node."""

    type: ClassVar[str] = "job-ended"
    #: What the agent exits with.
    exitcode: int
    reason: str
    #: The first failure of the job, as in `worker-failed`; null after success.
    cause: Json | None = None


# --- what the leader sees and decides ------------------------------------------------------------


@dataclass(frozen=True)
class BecameLeader(Event):
    """This agent decides for the job from now on."""

    type: ClassVar[str] = "became-leader"


@dataclass(frozen=True)
class LeaderFound(Event):
    """This agent tells its events to another node, which leads, from now on."""

    type: ClassVar[str] = "leader-found"
    #: Of that node.
    name: str


@dataclass(frozen=True)
class NodeJoined(Event):
    """The leader sees a new member."""

    type: ClassVar[str] = "node-joined"
    name: str


@dataclass(frozen=True)
class NodeLost(Event):
    """A member is gone without having said so."""

    type: ClassVar[str] = "node-lost"
    name: str
    reason: str


@dataclass(frozen=True)
class NodeLeaving(Event):
    """A member has announced its departure."""

    type: ClassVar[str] = "node-leaving"
    name: str
    reason: str


@dataclass(frozen=True)
class RestartDecided(Event):
    """Whether the job goes on after a generation, and why."""

    type: ClassVar[str] = "restart-decided"
    restart: bool
    reason: str
    #: What ended the generation, as in `generation-over`, now that all have spoken.
    kind: str = ""
    #: The first failure, as in `worker-failed` (of a node: rank -1); null where nothing failed.
    cause: Json | None = None
    #: What fell because of it; the first ones.
    consequences: Sequence[Json] = ()


# --- generations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldFormed(Event):
    """A generation begins."""

    type: ClassVar[str] = "world-formed"
    #: Names, in the order of their ranks: of all its nodes, or of those this agent knows.
    nodes: Sequence[str]
    #: Workers in the world.
    size: int
    #: Address of the store made for this generation alone.
    store: str
    reason: str
    restarts_used: int
    #: Names of the nodes that wait to step in; the first of them.
    spares: Sequence[str] = ()
    #: How many nodes it has; 0: as many as are named.
    count: int = 0
    #: Names of the nodes that are held out because they kept failing, and why.
    held: Json = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationOver(Event):
    """A generation ends: its workers are being stopped."""

    type: ClassVar[str] = "generation-over"
    #: What ended it.
    kind: Literal["failure", "error", "node-failure", "resize", "leave", "finished", "stop"]
    reason: str
    #: The first failure as far as it is known, as in `restart-decided`.
    cause: Json | None = None


@dataclass(frozen=True)
class WorldChanging(Event):
    """Resident workers are asked for their step: the generation ends when all have run it."""

    type: ClassVar[str] = "world-changing"
    #: Who joins or leaves.
    reason: str


@dataclass(frozen=True)
class Waiting(Event):
    """There is no world: too few nodes are there, or those that are get ready."""

    type: ClassVar[str] = "waiting"
    #: Nodes that are needed.
    need: int
    #: Names of former members that are not there.
    missing: Sequence[str]
    #: How many are there, and how long the job goes on waiting.
    reason: str
    #: Enough nodes are there: nobody is waited for, they warm up or start their workers.
    enough: bool = False


# --- workers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkersStarted(Event):
    """All workers of this node run."""

    type: ClassVar[str] = "workers-started"
    #: Global ranks, in the order of `pids`.
    ranks: Sequence[int]
    pids: Sequence[int]
    #: From the first start to the last.
    seconds: float


@dataclass(frozen=True)
class StandbyStarted(Event):
    """A worker starts that will enter a later world: a replacement, or a newcomer's."""

    type: ClassVar[str] = "standby-started"
    local_rank: int
    worker_pid: int
    seconds: float


@dataclass(frozen=True)
class Training(Event):
    """A resident worker trains in its world: the group stands, its state is the freshest."""

    type: ClassVar[str] = "training"
    rank: int
    #: Steps committed so far.
    step: int
    #: Bytes of state it had to fetch from others.
    received: int
    #: Seconds from entering the world until the group stood.
    built: float = 0.0
    #: Seconds of exchanging and transferring state.
    fetched: float = 0.0


@dataclass(frozen=True)
class Progress(Event):
    """How far the workers of this node are: about every second while that changes, and at the end
    of a generation."""

    type: ClassVar[str] = "progress"
    #: Global ranks, in the order of `steps` and `at`.
    ranks: Sequence[int]
    #: The last step each has entered; -1: none yet.
    steps: Sequence[int]
    #: When it was entered, by the same clock as `mono`.
    at: Sequence[float]
    #: Seconds of its workers in this generation: `data`, `checkpoint`, `snapshot`, `restore`.
    stalls: Mapping[str, float] = field(default_factory=dict)
    #: Seconds of each worker's steps in this generation, without what it waited for others.
    own: Sequence[float] = ()
    #: What the script reported last, by name: the lowest rank's; null: not a finite number.
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    #: Samples that all workers of the job together have trained with; -1: nobody counts.
    samples: int = -1
    #: Of a script that tells no steps, whose optimizer's are counted: how many of these were taken
    #: before this generation, by the optimizer's own state; 0: not known; -1: they are those of one
    #: optimizer after another, and begin anew with each generation. Null: the script tells them.
    before: int | None = None


@dataclass(frozen=True)
class CheckpointStored(Event):
    """A checkpoint is in storage: the last one, where they come quicker than this is told."""

    type: ClassVar[str] = "checkpoint-stored"
    #: Who told of it.
    rank: int
    #: Steps that it has.
    step: int
    #: When that was, by the same clock as `mono`.
    at: float
    #: How long it took to write, beside the training.
    seconds: float
    #: In bytes.
    size: int


@dataclass(frozen=True)
class Straggler(Event):
    """A worker is slower than the others, which wait for it; said again when it costs much more,
    and once more when that, or its generation, is over. By the leader."""

    type: ClassVar[str] = "straggler"
    rank: int
    #: Of its own, without waiting for others.
    seconds_per_step: float
    #: The median of all ranks.
    usual: float
    #: Seconds of this generation that the others have waited for it.
    cost: float
    #: For people.
    text: str
    #: The name of its node, and the last step that was looked at.
    name: str = ""
    step: int = -1
    #: Seconds of this generation that all have waited for any such worker.
    lost: float = 0.0
    #: It keeps up again.
    over: bool = False
    #: It was said before, and costs much more now.
    again: bool = False


@dataclass(frozen=True)
class Hang(Event):
    """Workers stand still: what every rank of the world was doing, before any of them is ended."""

    type: ClassVar[str] = "hang"
    #: Who is missing from what the others wait in, for people.
    text: str
    #: The ranks that the others wait for, as far as that is known.
    missing: Sequence[int]
    #: What each does: as in `torchelastic stacks --json`, `stack` being a place in `stacks`.
    ranks: Sequence[Json]
    #: What their threads were doing: equal ones are here once.
    stacks: Sequence[str] = ()
    #: Names of nodes that have not told in time what theirs are doing.
    unheard: Sequence[str] = ()


@dataclass(frozen=True)
class WorkerKilled(Event):
    """The agent kills a worker that hangs."""

    type: ClassVar[str] = "worker-killed"
    rank: int
    local_rank: int
    reason: str
    #: What its threads were doing, where that could be read.
    stack: str = ""


@dataclass(frozen=True)
class WorkerExited(Event):
    """A worker has ended, well or not."""

    type: ClassVar[str] = "worker-exited"
    rank: int
    local_rank: int
    worker_pid: int
    #: Minus the number of the signal that ended it.
    exitcode: int


@dataclass(frozen=True)
class WorkerFailed(Event):
    """A worker has ended otherwise than by success and was not asked to."""

    type: ClassVar[str] = "worker-failed"
    #: Generation, node, rank, exit code, message, traceback, step and more.
    failure: Json


@dataclass(frozen=True)
class WorkersStopped(Event):
    """No worker is left on this node, nor anything a worker started."""

    type: ClassVar[str] = "workers-stopped"
    #: From the order to stop.
    seconds: float


EVENTS: dict[str, type[Event]] = {
    cls.type: cls
    for cls in (
        AgentStarted,
        ZygoteReady,
        ZygoteUnavailable,
        Joined,
        LeaseLost,
        SignalReceived,
        Leaving,
        Note,
        JobEnded,
        BecameLeader,
        LeaderFound,
        NodeJoined,
        NodeLost,
        NodeLeaving,
        RestartDecided,
        WorldFormed,
        GenerationOver,
        WorldChanging,
        Waiting,
        WorkersStarted,
        StandbyStarted,
        Training,
        Progress,
        CheckpointStored,
        Straggler,
        Hang,
        WorkerKilled,
        WorkerExited,
        WorkerFailed,
        WorkersStopped,
    )
}


def from_fields(name: str, data: Json) -> Event | None:
    """The event a line tells of; None for one this version does not know or that makes no sense."""
    cls = EVENTS.get(name)
    if cls is None:
        return None
    checks = _checks(cls)
    given = {key: value for key, value in data.items() if key in checks}
    if not all(checks[key](value) for key, value in given.items()):
        return None
    try:
        return cls(**given)
    except TypeError:  # a field is missing
        return None


def _field_names(cls: type[Event]) -> list[str]:
    return [item.name for item in dataclasses.fields(typing.cast(Any, cls))]


Check = Callable[[Any], bool]

_CHECKS: dict[type[Event], dict[str, Check]] = {}


def _checks(cls: type[Event]) -> dict[str, Check]:
    """Field name -> whether a value fits it. Kept: to work it out costs more than to read lines."""
    if cls not in _CHECKS:
        resolved = typing.get_type_hints(cls)
        _CHECKS[cls] = {name: _check_of(resolved[name]) for name in _field_names(cls)}
    return _CHECKS[cls]


def _check_of(hint: Any) -> Check:
    """Whether a value read from JSON is what a field is declared to hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return lambda value: value in args
    if origin in (UnionType, typing.Union):
        choices = [_check_of(arg) for arg in args]
        return lambda value: any(choice(value) for choice in choices)
    if origin is Sequence:
        return partial(_is_list, _check_of(args[0]))
    if origin is Mapping:
        return partial(_is_object, _check_of(args[1]))
    if hint is float:
        return _is_number
    if hint is int:
        return _is_int
    if hint is Any:
        return lambda value: True
    return lambda value: isinstance(value, hint)


def _is_list(item: Check, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(item, value))


def _is_object(item: Check, value: Any) -> bool:
    return isinstance(value, dict) and all(map(item, value.values()))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """JSON has no others than finite ones; Python's reader takes them."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
