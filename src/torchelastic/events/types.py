"""The event types of a job's log. Type and field names are part of the file format: never rename.

`docs/reference/events.md` is generated from the docstrings, the fields and the comments above them.
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
        """The fields of this event type, without those that every line has."""
        return {name: getattr(self, name) for name in _field_names(type(self))}


# --- an agent's life -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentStarted(Event):
    """An agent started."""

    type: ClassVar[str] = "agent-started"
    pid: int
    #: Rendezvous endpoint; empty for a job on this machine only.
    endpoint: str
    #: Command that the workers run.
    command: Sequence[str]
    min_nodes: int
    max_nodes: int
    #: Workers on this node.
    nproc: int


@dataclass(frozen=True)
class ZygoteReady(Event):
    """The zygote is ready: from now on, workers are forked from it with their imports done."""

    type: ClassVar[str] = "zygote-ready"
    #: Time the zygote took to start.
    seconds: float


@dataclass(frozen=True)
class ZygoteUnavailable(Event):
    """There is no zygote: workers are started as plain processes."""

    type: ClassVar[str] = "zygote-unavailable"
    reason: str


@dataclass(frozen=True)
class Joined(Event):
    """This node joined the job's rendezvous."""

    type: ClassVar[str] = "joined"
    #: Display name of the node.
    name: str
    #: Address of the rendezvous store.
    endpoint: str
    #: True if this agent hosts that store.
    hosting: bool


@dataclass(frozen=True)
class LeaseLost(Event):
    """The store dropped this node; it stops its workers and joins again."""

    type: ClassVar[str] = "lease-lost"
    reason: str


@dataclass(frozen=True)
class SignalReceived(Event):
    """The agent received a signal."""

    type: ClassVar[str] = "signal-received"
    #: Name of the signal, such as `SIGTERM`.
    signal: str
    #: What the agent does in response.
    action: str


@dataclass(frozen=True)
class Leaving(Event):
    """This node announced that it leaves the job."""

    type: ClassVar[str] = "leaving"
    reason: str


@dataclass(frozen=True)
class Note(Event):
    """A message for people; it does not change the state of the job."""

    type: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class JobEnded(Event):
    """The job ended for this node. The last event of an agent."""

    type: ClassVar[str] = "job-ended"
    #: Exit code of the agent.
    exitcode: int
    reason: str
    #: The first failure of the job, as in `worker-failed`; null after success.
    cause: Json | None = None


# --- the leader ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BecameLeader(Event):
    """This agent is now the leader of the job."""

    type: ClassVar[str] = "became-leader"


@dataclass(frozen=True)
class LeaderFound(Event):
    """Another node is the leader; this agent now sends its events to it."""

    type: ClassVar[str] = "leader-found"
    #: Name of the leader's node.
    name: str


@dataclass(frozen=True)
class NodeJoined(Event):
    """The leader sees a new member node."""

    type: ClassVar[str] = "node-joined"
    name: str


@dataclass(frozen=True)
class NodeLost(Event):
    """A member node is gone without notice: it failed or cannot be reached."""

    type: ClassVar[str] = "node-lost"
    name: str
    reason: str


@dataclass(frozen=True)
class NodeLeaving(Event):
    """A member node announced that it leaves."""

    type: ClassVar[str] = "node-leaving"
    name: str
    reason: str


@dataclass(frozen=True)
class RestartDecided(Event):
    """The leader's decision after a generation: restart the workers, or end the job."""

    type: ClassVar[str] = "restart-decided"
    restart: bool
    reason: str
    #: What ended the generation, as in `generation-over`, now that all nodes have reported.
    kind: str = ""
    #: The first failure, as in `worker-failed` (rank -1 for a node); null if nothing failed.
    cause: Json | None = None
    #: Failures that followed from it; only the first of them.
    consequences: Sequence[Json] = ()


# --- generations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldFormed(Event):
    """A generation begins with a new world."""

    type: ClassVar[str] = "world-formed"
    #: Names of the world's nodes in rank order: all of them, or those this agent knows.
    nodes: Sequence[str]
    #: Workers in the world.
    size: int
    #: Address of the store that serves this generation only.
    store: str
    reason: str
    restarts_used: int
    #: Names of the spare nodes; only the first of them.
    spares: Sequence[str] = ()
    #: Number of nodes in the world; 0: as many as `nodes` lists.
    count: int = 0
    #: Nodes held out because they kept failing: name and reason.
    held: Json = field(default_factory=dict)
    #: The number of workers in a replica; 0: the model is not sharded. A world whose scripts name
    #: it only in `torchelastic.train` is reported again then.
    replica: int = 0


@dataclass(frozen=True)
class GenerationOver(Event):
    """A generation ended; its workers are being stopped."""

    type: ClassVar[str] = "generation-over"
    #: What ended it.
    kind: Literal["failure", "error", "node-failure", "resize", "leave", "finished", "stop"]
    reason: str
    #: The first failure known so far, as in `restart-decided`.
    cause: Json | None = None


@dataclass(frozen=True)
class StatesDiffered(Event):
    """The workers' states were not equal: the job goes back to a step where they were."""

    type: ClassVar[str] = "states-differed"
    #: Ranks whose states were wrong, and their nodes; empty if that is not known.
    ranks: Sequence[int]
    names: Sequence[str]
    #: The step that training goes back to.
    back: int
    text: str


@dataclass(frozen=True)
class WorldChanging(Event):
    """The world is about to change: the generation ends once all in-process workers have finished
    the same step."""

    type: ClassVar[str] = "world-changing"
    #: Which nodes join or leave.
    reason: str


@dataclass(frozen=True)
class Waiting(Event):
    """There is no world yet: nodes are missing, or are still getting ready."""

    type: ClassVar[str] = "waiting"
    #: Number of nodes needed.
    need: int
    #: Names of former members that are missing.
    missing: Sequence[str]
    #: How many nodes are present, and how much longer the job waits.
    reason: str
    #: True if enough nodes are present and only have to warm up or start their workers.
    enough: bool = False


# --- workers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkersStarted(Event):
    """All workers of this node are running."""

    type: ClassVar[str] = "workers-started"
    #: Global ranks, in the order of `pids`.
    ranks: Sequence[int]
    pids: Sequence[int]
    #: Time from the first start to the last.
    seconds: float


@dataclass(frozen=True)
class StandbyStarted(Event):
    """A worker started ahead of the next world: a replacement, or a worker of a new node."""

    type: ClassVar[str] = "standby-started"
    local_rank: int
    worker_pid: int
    seconds: float


@dataclass(frozen=True)
class Training(Event):
    """An in-process worker trains in the new world: its process group and state are ready."""

    type: ClassVar[str] = "training"
    rank: int
    #: Steps committed so far.
    step: int
    #: Bytes of state fetched from other workers.
    received: int
    #: Seconds from entering the world until the process group was built.
    built: float = 0.0
    #: Seconds spent comparing and transferring state.
    fetched: float = 0.0


@dataclass(frozen=True)
class Progress(Event):
    """The steps that this node's workers have reached: written about once a second while they
    change, and at the end of a generation."""

    type: ClassVar[str] = "progress"
    #: Global ranks, in the order of `steps` and `at`.
    ranks: Sequence[int]
    #: The last step each rank entered; -1: none yet.
    steps: Sequence[int]
    #: When it entered that step, on the same clock as `mono`.
    at: Sequence[float]
    #: Seconds lost in this generation, by kind: `data`, `checkpoint`, `snapshot`, `restore`.
    stalls: Mapping[str, float] = field(default_factory=dict)
    #: Seconds each rank spent in steps of this generation, not counting waits for other ranks.
    own: Sequence[float] = ()
    #: Last values reported by the script, by name, from the lowest rank; null: not finite.
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    #: Samples that all workers of the job have trained with or skipped so far; -1: not counted.
    samples: int = -1
    #: Null if the script reports its steps. Otherwise optimizer steps are counted, and this is how
    #: many the optimizer had taken before this generation; 0: unknown; -1: several optimizers were
    #: counted one after another, and the count starts again with each generation.
    before: int | None = None
    #: Micro-batches that each rank ran of its last step, with a fixed batch (`BatchPolicy.fixed`).
    shares: Sequence[int] = ()


@dataclass(frozen=True)
class CheckpointStored(Event):
    """A checkpoint is in storage. When checkpoints are frequent, only the latest is reported."""

    type: ClassVar[str] = "checkpoint-stored"
    #: Rank that reported it.
    rank: int
    #: Step of the checkpoint.
    step: int
    #: When it was stored, on the same clock as `mono`.
    at: float
    #: Time it took to write, in the background of training.
    seconds: float
    #: Size in bytes.
    size: int


@dataclass(frozen=True)
class WeightsHashed(Event):
    """The hash of the weights in a checkpoint, or at the end of the training, of a job with a fixed
    batch (`BatchPolicy.fixed`): equal in all runs of the same training. When checkpoints are
    frequent, only the latest is reported."""

    type: ClassVar[str] = "weights-hashed"
    #: Rank that reported it.
    rank: int
    #: Steps that the weights were trained for.
    step: int
    #: SHA-256, as of `TorchState.digest()`.
    sha256: str
    #: The training has ended with these weights.
    final: bool = False


@dataclass(frozen=True)
class StepSkipped(Event):
    """A step had bad numbers, so nothing of it was kept (`torchelastic.Guard`). Each rank writes
    one; more if its samples do not fit into one."""

    type: ClassVar[str] = "step-skipped"
    rank: int
    #: The number of the step, as in the ledger: the first step is 1.
    step: int
    #: What is bad, as a sentence without a period.
    reason: str
    #: Norm of the gradient that all ranks have; the text `nan`, `inf` or `-inf` if not finite.
    norm: float | str
    #: The mean over ranks, likewise; null: not known.
    loss: float | str | None
    #: Robust standard deviations above the median; 0: it is no spike.
    deviation: float
    #: Whether this rank's own numbers were bad.
    is_origin: bool
    #: `skip`: the step stays empty, and its samples are not used. `retry`: it is repeated.
    #: `stop`: training ends.
    action: Literal["skip", "retry", "stop"]
    #: This rank's samples, as in the ledger: objects with `epoch`, `ids`, `size` and `span`.
    samples: Sequence[Json] = ()
    #: With a fixed batch: the micro-batches of this rank whose own numbers were bad.
    micro_batches: Sequence[int] = ()


@dataclass(frozen=True)
class Straggler(Event):
    """A worker is slower than the others, which wait for it. The leader writes this again when the
    cost grows a lot, and once more when the worker has recovered or its generation has ended."""

    type: ClassVar[str] = "straggler"
    rank: int
    #: Its time per step, not counting waits for other ranks.
    seconds_per_step: float
    #: The median of all ranks.
    usual: float
    #: Seconds that the others waited for it in this generation.
    cost: float
    #: The finding as a sentence.
    text: str
    #: Name of its node.
    name: str = ""
    #: The last step that was measured.
    step: int = -1
    #: Seconds that were lost to all stragglers in this generation.
    lost: float = 0.0
    #: It keeps up again.
    over: bool = False
    #: It was reported before, and costs much more now.
    again: bool = False


@dataclass(frozen=True)
class Hang(Event):
    """Workers are hung. Written before any of them is killed, with what every rank was doing."""

    type: ClassVar[str] = "hang"
    #: Which ranks are missing from the collective that the others wait in, as a sentence.
    text: str
    #: The ranks that the others wait for, if known.
    missing: Sequence[int]
    #: What each rank was doing, as in `torchelastic stacks --json`; `stack` is an index into
    #: `stacks`.
    ranks: Sequence[Json]
    #: Stacks of their threads; equal stacks are stored once.
    stacks: Sequence[str] = ()
    #: Names of nodes that did not answer in time.
    unheard: Sequence[str] = ()


@dataclass(frozen=True)
class WorkerKilled(Event):
    """The agent killed a hung worker."""

    type: ClassVar[str] = "worker-killed"
    rank: int
    local_rank: int
    reason: str
    #: Stacks of its threads, if they could be read.
    stack: str = ""


@dataclass(frozen=True)
class WorkerExited(Event):
    """A worker process ended, with success or not."""

    type: ClassVar[str] = "worker-exited"
    rank: int
    local_rank: int
    worker_pid: int
    #: Exit code; negative: minus the number of the signal that killed it.
    exitcode: int
    #: Seconds it took to end after its program had returned; 0: unknown.
    exiting: float = 0.0


@dataclass(frozen=True)
class WorkerFailed(Event):
    """A worker failed: it ended without success, and not because its agent stopped it."""

    type: ClassVar[str] = "worker-failed"
    #: Generation, node, rank, exit code, message, traceback, step and more.
    failure: Json


@dataclass(frozen=True)
class WorkersStopped(Event):
    """All workers of this node, and all processes they started, are gone."""

    type: ClassVar[str] = "workers-stopped"
    #: Time since the order to stop.
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
        StatesDiffered,
        WorldChanging,
        Waiting,
        WorkersStarted,
        StandbyStarted,
        Training,
        Progress,
        CheckpointStored,
        WeightsHashed,
        StepSkipped,
        Straggler,
        Hang,
        WorkerKilled,
        WorkerExited,
        WorkerFailed,
        WorkersStopped,
    )
}


def from_fields(name: str, data: Json) -> Event | None:
    """Return the event of a line; None if its type is unknown or its fields do not fit."""
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
    """Return a check per field name. Cached: building them costs more than reading lines."""
    if cls not in _CHECKS:
        resolved = typing.get_type_hints(cls)
        _CHECKS[cls] = {name: _check_of(resolved[name]) for name in _field_names(cls)}
    return _CHECKS[cls]


def _check_of(hint: Any) -> Check:
    """Return the check that a value read from JSON fits a field's declared type."""
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
    """Reject NaN and infinity: JSON has neither, but Python's reader accepts them."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
