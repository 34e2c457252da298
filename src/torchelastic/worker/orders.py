"""The messages between an agent and an in-process worker, as data.

A worker that has called `torchelastic.train` is an in-process worker: it outlives its generation.
Its agent tells it which world to enter and when that world is over; the worker answers. Each
message is one JSON object, and its `type` is the class's name in lower case.

The exchange that ends a world at a step boundary:

    agent   Ask(g)            to every worker of the world
    worker  Entered(g, e)     the last step it has entered; it enters no other one
    agent   Enter(g+1, after=T)  or Through(g, T), where T is the largest of all answers
    worker  runs through T, then enters g+1, or stops: Stopped(g, T + 1)

and after a failure:

    agent   Over(g, why)
    worker  aborts its collectives, rolls back to the beginning of its step: Stopped(g, step)
    agent   Enter(g+1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torchelastic.transport.codec import Codec

# --- down: from the agent to the worker ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Enter:
    """A world to enter: at once, or when the present one has been run through step `after`."""

    generation: int
    rank: int
    size: int
    #: `host:port` of the store made for this generation alone.
    store: str
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    after: int | None = None
    #: The number of workers in a replica: rank r is in replica r // replica. 0: the model is not
    #: sharded.
    replica: int = 0
    #: Why the workers do not compare their states any more; empty: they do if the script asks.
    unchecked: str = ""
    #: The generation before which all work beyond a version is void, and that version.
    rewind: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Ask:
    """Asks for the step that the worker has entered. It enters no other until the next order."""

    generation: int


@dataclass(frozen=True)
class Through:
    """Run through this step, then stop: no next world can be formed yet."""

    generation: int
    step: int


@dataclass(frozen=True)
class Over:
    """The generation, and every one before it, is over: abort, roll back, answer `Stopped`.

    With `finished` the training is done: `train` returns. `through` is then the last step committed
    by the worker whose data has ended. A worker still in that step finishes it first, so that all
    return with the same steps; a worker in a later one, which can never end, aborts.
    """

    generation: int
    reason: str = ""
    finished: bool = False
    through: int | None = None


@dataclass(frozen=True)
class Leave:
    """This node leaves the job: end the process. An in-process worker has stopped before."""

    #: The signal that asked for it.
    signum: int = 15
    #: When the process will be killed, by this machine's monotonic clock, if known.
    deadline: float | None = None
    #: For a worker of a script that `CanSave`: True if it stores the state before it leaves; None:
    #: another `Leave` follows.
    saves: bool | None = None


@dataclass(frozen=True)
class Certified:
    """The states of all workers were equal after `step` steps; with a reason in `unchecked`, states
    are not compared any more."""

    generation: int
    step: int
    unchecked: str = ""


@dataclass(frozen=True)
class Closed:
    """The job ended before the training did: `train` raises."""

    reason: str


@dataclass(frozen=True)
class Ping:
    """Asks if the worker responds and what it waits for. The control thread answers at once."""

    #: Comes back with the answer.
    number: int = 0


@dataclass(frozen=True)
class Dump:
    """Write the stacks of all threads to the file that comes with this: a worker is hung."""


@dataclass(frozen=True)
class StatusPage:
    """Carries the memory for this worker's progress and private state."""

    kind: ClassVar[str] = "status-page"
    #: Seconds after which a peer that does not answer counts as unreachable; 0: never.
    silence: float = 0.0


# --- up: from the worker to the agent ------------------------------------------------------------


@dataclass(frozen=True)
class Enlisted:
    """`train` was called with a state: this worker can enter a world in its process."""

    #: The number of workers in its mesh (`torchelastic.mesh`); 0: it made none.
    replica: int = 0


@dataclass(frozen=True)
class Keeps:
    """A script keeps its state from step to step and needs a status page."""


@dataclass(frozen=True)
class CanSave:
    """A script keeps a state that it can put into storage before this worker leaves."""

    #: Only together with the workers of other nodes, at the next commit: these must not learn of
    #: the leave, and stop, before the worker says `Saved`.
    together: bool = False


@dataclass(frozen=True)
class Saved:
    """A worker that saves `together` with others has nothing more to do before it leaves."""


@dataclass(frozen=True)
class Entered:
    """The answer to `Ask`; -1 before the first step of the generation's loop."""

    generation: int
    step: int


@dataclass(frozen=True)
class Checked:
    """The hash of this worker's state after `step` steps, for the leader to compare."""

    generation: int
    step: int
    digest: int
    #: The version of the certified state that it has a copy of; (-1, -1): none.
    written: int = -1
    pinned: int = -1
    #: When steps were taken again: the first that gave another result than before; -1: none.
    odd: int = -1


@dataclass(frozen=True)
class Begins:
    """Rank 0: no worker has the state in memory, so training begins here, at `step`."""

    generation: int
    step: int
    #: True if checkpoints are written, by a manager or by the script itself.
    stored: bool


@dataclass(frozen=True)
class Up:
    """The process group and the state are ready; training continues from `step`."""

    generation: int
    step: int
    #: Bytes of state this worker has received for it.
    received: int = 0
    #: Seconds from entering the world until the process group was ready.
    built: float = 0.0
    #: Seconds the exchange and transfer of state took.
    fetched: float = 0.0


@dataclass(frozen=True)
class Stopped:
    """This worker has stopped in this generation; `step` steps are committed."""

    generation: int
    step: int


@dataclass(frozen=True)
class Erred:
    """User code raised; the worker has rolled back and stays alive, like after `Stopped`."""

    generation: int
    step: int
    message: str
    traceback: str
    #: False: trying again cannot help, the job ends.
    retry: bool = True
    #: `error_file.user_frame` of the whole traceback.
    place: str = ""


@dataclass(frozen=True)
class PeerLost:
    """A collective failed: a hint that a peer is lost. The worker has rolled back."""

    generation: int
    step: int
    message: str


@dataclass(frozen=True)
class Unfit:
    """This worker is incompatible with the training and exits; a new one would, too."""


@dataclass(frozen=True)
class Finished:
    """The data has ended here: the training is done. The worker has rolled back nothing."""

    generation: int
    step: int


@dataclass(frozen=True)
class Returned:
    """The program has returned, or called `sys.exit`: the interpreter ends."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint is in storage: its step, the seconds it took, and its size in bytes."""

    step: int
    seconds: float
    size: int


@dataclass(frozen=True)
class Hashed:
    """The hash of the weights after `step` steps: in a checkpoint, or `final`."""

    step: int
    sha256: str
    final: bool = False


@dataclass(frozen=True)
class UsedSamples:
    """Samples of a step on one rank (`data.progress.Handed`)."""

    epoch: int
    size: int
    span: tuple[int, int]
    ids: list[int | tuple[int, int]]


@dataclass(frozen=True)
class BadStep:
    """A step had bad numbers; the fields are those of `events.types.StepSkipped`."""

    step: int
    rank: int
    reason: str
    norm: float | str
    loss: float | str | None
    deviation: float
    is_origin: bool
    action: str
    samples: list[UsedSamples]
    micro_batches: list[int]


@dataclass(frozen=True)
class Pong:
    """The answer to `Ping`."""

    #: The training thread waits for a collective, that is, for others.
    waiting: bool
    #: True if it has been told that the generation it waits in is over.
    aborted: bool = False
    #: Of the question.
    number: int = 0


Order = Enter | Ask | Through | Over | Leave | Certified | Closed | Ping | Dump | StatusPage
Report = (
    Enlisted
    | Keeps
    | CanSave
    | Saved
    | Entered
    | Checked
    | Begins
    | Up
    | Stopped
    | Erred
    | PeerLost
    | Unfit
    | Finished
    | Returned
    | Stored
    | Hashed
    | BadStep
    | Pong
)

_codec: Codec[Order | Report] = Codec(*get_args(Order | Report))
to_json, from_json = _codec.to_json, _codec.from_json
