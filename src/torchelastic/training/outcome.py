"""The table from exceptions to actions: the whole policy of the training loop. Pure.

The action depends on the kind of the exception (`kind_of`), the place where it was raised, and
whether the agent has ended the world meanwhile. `decide` is the table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from torchelastic.errors import (
    ConfigError,
    NonRetryableException,
    OtherBitsError,
    StopException,
    UnfitError,
)
from torchelastic.training.group.abortable_waits import GenerationOver, PeerLostError


class AnotherWorld(Exception):
    """The coordinator's `should_rendezvous` asked for a new world. No step is undone."""


class Where(enum.Enum):
    """The training thread's activity when the exception was raised."""

    BUILD = "building the process group"
    SYNC = "synchronizing the state"
    STEP = "in a step"
    BETWEEN = "between two steps: writing a checkpoint, calling the coordinator's hooks"


class Kind(enum.Enum):
    """The meaning of an exception."""

    OVER = "the world is over"
    PEER_LOST = "a peer is lost"
    END_OF_DATA = "there is no more data"
    STOP = "user code asks to stop"
    FATAL = "user code reports that a retry cannot help"
    UNFIT = "this worker has built a different model than the others"
    OTHER_BITS = "this worker computes other bits than the others"
    EXIT = "the process must end: SystemExit, KeyboardInterrupt"
    ASKED = "the coordinator asks for a new world"
    USER = "an error in user code"


class Action(enum.Enum):
    """The loop's reaction. All but FINISH and the last three roll back the state."""

    WAIT = "answer that this worker has stopped, wait for the next world"
    HINT = "report a lost peer, wait until the world is over"
    RETRY = "report the error, wait until the world is over, retry"
    FINISH = "report the end of the data, wait until the training is over everywhere"
    GIVE_UP = "report an error that ends the job, raise it"
    WITHDRAW = "report that any worker started here would be incompatible, raise it"
    RAISE = "raise it: the agent sees the process end"


def kind_of(error: BaseException, where: Where) -> Kind:
    """Return the meaning of an exception, searching its whole chain.

    A `StopIteration` is the end of the data only in a step. Python turns one that leaves a
    generator into a RuntimeError (PEP 479); it means the same.
    """
    if isinstance(error, NonRetryableException):
        return Kind.FATAL
    if isinstance(error, UnfitError):
        return Kind.UNFIT
    if isinstance(error, OtherBitsError):
        return Kind.OTHER_BITS
    if isinstance(error, AnotherWorld):
        return Kind.ASKED
    if not isinstance(error, Exception):
        return Kind.EXIT
    if where is Where.STEP and _is_end_of_data(error):
        return Kind.END_OF_DATA
    for link in chain(error):
        if isinstance(link, GenerationOver):
            return Kind.OVER
        if isinstance(link, PeerLostError):
            return Kind.PEER_LOST
    if isinstance(error, StopException):
        return Kind.STOP
    # Building is not user code: unless we reject the user's configuration, a failure means that a
    # store or a peer is gone.
    building = where is Where.BUILD and not isinstance(error, ConfigError)
    return Kind.PEER_LOST if building else Kind.USER


def _is_end_of_data(error: Exception) -> bool:
    leaked = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
    return leaked or isinstance(error, StopIteration)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, and those that it was raised from or while handling."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:  # a chain may be a ring
            continue
        seen.add(id(link))
        yield link
        waiting += [item for item in (link.__context__, link.__cause__) if item is not None]


#: Kind -> the action while the world lasts, and once it is over. An error of user code after its
#: world has ended proves nothing: if it was not caused by that end, it will come again.
TABLE: dict[Kind, tuple[Action, Action]] = {
    Kind.OVER: (Action.WAIT, Action.WAIT),
    Kind.PEER_LOST: (Action.HINT, Action.WAIT),
    Kind.ASKED: (Action.RETRY, Action.WAIT),
    Kind.USER: (Action.RETRY, Action.WAIT),
    Kind.END_OF_DATA: (Action.FINISH, Action.WAIT),
    Kind.STOP: (Action.FINISH, Action.WAIT),
    Kind.FATAL: (Action.GIVE_UP, Action.GIVE_UP),
    Kind.UNFIT: (Action.WITHDRAW, Action.WITHDRAW),
    Kind.OTHER_BITS: (Action.RAISE, Action.RAISE),
    Kind.EXIT: (Action.RAISE, Action.RAISE),
}


def decide(kind: Kind, *, over: bool, failures_left: bool = True) -> Action:
    """Return the action. Without `failures_left`, an error of user code is not retried."""
    action = TABLE[kind][over]
    out_of_failures = kind is Kind.USER and not failures_left
    return Action.GIVE_UP if action is Action.RETRY and out_of_failures else action
