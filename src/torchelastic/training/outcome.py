"""What an exception leads to: the whole policy of the training loop, as a table. Pure.

An exception is looked at in three steps: what kind is it (`kind_of`), where was it raised, and has
the agent said meanwhile that the world is over. `decide` is the table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from torchelastic.errors import ConfigError, NonRetryableException, StopException, UnfitError
from torchelastic.training.group.waits import GenerationOver, PeerLostError


class AnotherWorld(Exception):
    """The coordinator's `should_rendezvous` has asked for another world. No step is undone."""


class Where(enum.Enum):
    """What the training thread was doing."""

    BUILD = "building the process group"
    SYNC = "synchronising the state"
    STEP = "in a step"
    BETWEEN = "between two steps: writing a checkpoint, calling the coordinator's hooks"


class Kind(enum.Enum):
    """What an exception says."""

    OVER = "the world is over"
    PEER_LOST = "a peer is lost"
    END_OF_DATA = "there is no more data"
    STOP = "user code asks to stop"
    FATAL = "user code says that trying again cannot help"
    UNFIT = "this worker has built another model than the others"
    EXIT = "the process is to end: SystemExit, KeyboardInterrupt"
    ASKED = "the coordinator asks for another world"
    USER = "an error of user code"


class Action(enum.Enum):
    """What is done about it. All but FINISH and the last three roll back what was touched."""

    WAIT = "answer that nothing goes on here, wait for the next world"
    HINT = "report a lost peer, wait until the world is over"
    RETRY = "report the error, wait until the world is over, try again"
    FINISH = "report the end of the data, wait until the training is over everywhere"
    GIVE_UP = "report an error that ends the job, raise it"
    WITHDRAW = "report that no worker that starts here would fit, raise it"
    RAISE = "raise it: the end of the process says enough"


def kind_of(error: BaseException, where: Where) -> Kind:
    """What an exception says, wherever in its chain it says it.

    A `StopIteration` is the end of the data only in a step. Python turns one that leaves a
    generator into a RuntimeError (PEP 479); it means the same.
    """
    if isinstance(error, NonRetryableException):
        return Kind.FATAL
    if isinstance(error, UnfitError):
        return Kind.UNFIT
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
    # Building is not user code: what fails in it, unless we refuse what the user asks for, is a
    # store or a peer that is gone.
    building = where is Where.BUILD and not isinstance(error, ConfigError)
    return Kind.PEER_LOST if building else Kind.USER


def _is_end_of_data(error: Exception) -> bool:
    leaked = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
    return leaked or isinstance(error, StopIteration)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from or while handling."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:  # a chain may be tied into a ring
            continue
        seen.add(id(link))
        yield link
        waiting += [item for item in (link.__context__, link.__cause__) if item is not None]


#: Kind -> what is done while the world stands, and once it is over. What user code raises after its
#: world has ended says nothing about user code: it shows again if it was not the world's end.
TABLE: dict[Kind, tuple[Action, Action]] = {
    Kind.OVER: (Action.WAIT, Action.WAIT),
    Kind.PEER_LOST: (Action.HINT, Action.WAIT),
    Kind.ASKED: (Action.RETRY, Action.WAIT),
    Kind.USER: (Action.RETRY, Action.WAIT),
    Kind.END_OF_DATA: (Action.FINISH, Action.WAIT),
    Kind.STOP: (Action.FINISH, Action.WAIT),
    Kind.FATAL: (Action.GIVE_UP, Action.GIVE_UP),
    Kind.UNFIT: (Action.WITHDRAW, Action.WITHDRAW),
    Kind.EXIT: (Action.RAISE, Action.RAISE),
}


def decide(kind: Kind, *, over: bool, failures_left: bool = True) -> Action:
    """What to do; without `failures_left` an error of user code is not tried again."""
    action = TABLE[kind][over]
    out_of_failures = kind is Kind.USER and not failures_left
    return Action.GIVE_UP if action is Action.RETRY and out_of_failures else action
