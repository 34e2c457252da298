"""Which exception leads to what: every cell of the table."""

import pytest

from torchelastic.errors import ConfigError, NonRetryableException, StopException, UnfitError
from torchelastic.training.group.group import GenerationOver, PeerLostError
from torchelastic.training.outcome import (
    Action,
    AnotherWorld,
    Kind,
    Where,
    chain,
    decide,
    kind_of,
)


def caused_by(error, cause):
    error.__cause__ = cause
    return error


def while_handling(error, context):
    error.__context__ = context
    return error


def leaked():
    """A StopIteration that has left a native generator (PEP 479)."""

    def steps():
        yield next(iter(()))

    try:
        next(steps())
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GenerationOver("over"), Kind.OVER),
        (PeerLostError("reset"), Kind.PEER_LOST),
        (StopIteration(), Kind.END_OF_DATA),
        (leaked(), Kind.END_OF_DATA),
        (StopException(), Kind.STOP),
        (NonRetryableException("no"), Kind.FATAL),
        (UnfitError("another model"), Kind.UNFIT),
        (while_handling(UnfitError(), PeerLostError()), Kind.UNFIT),
        (AnotherWorld("asked"), Kind.ASKED),
        (KeyboardInterrupt(), Kind.EXIT),
        (SystemExit(0), Kind.EXIT),
        (ValueError("a bug"), Kind.USER),
        (RuntimeError("a bug, too"), Kind.USER),
        (caused_by(ValueError(), PeerLostError()), Kind.PEER_LOST),
        (while_handling(KeyError(), GenerationOver()), Kind.OVER),
        (caused_by(RuntimeError(), while_handling(OSError(), PeerLostError())), Kind.PEER_LOST),
        (caused_by(NonRetryableException(), PeerLostError()), Kind.FATAL),
    ],
    ids=repr,
)
def test_kinds_of_errors_in_a_step(error, kind):
    assert kind_of(error, Where.STEP) is kind


@pytest.mark.parametrize(
    ("error", "where", "kind"),
    [
        (StopIteration(), Where.SYNC, Kind.USER),  # no data is ended outside of a step
        (leaked(), Where.SYNC, Kind.USER),
        (StopIteration(), Where.BETWEEN, Kind.USER),
        (leaked(), Where.BETWEEN, Kind.USER),
        (RuntimeError("connection refused"), Where.BUILD, Kind.PEER_LOST),  # not user code
        (ConfigError("one backend"), Where.BUILD, Kind.USER),  # a refusal of ours
        (GenerationOver(), Where.BUILD, Kind.OVER),
        (KeyboardInterrupt(), Where.BUILD, Kind.EXIT),
        (UnfitError(), Where.BUILD, Kind.UNFIT),
    ],
    ids=repr,
)
def test_kinds_of_errors_elsewhere(error, where, kind):
    assert kind_of(error, where) is kind


def test_a_chain_may_be_a_ring():
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert {*chain(first)} == {first, second}
    assert kind_of(first, Where.STEP) is Kind.USER


def test_what_is_done():
    """While the world stands, and when it is over."""
    assert {kind: (decide(kind, over=False), decide(kind, over=True)) for kind in Kind} == {
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


def test_only_errors_of_user_code_use_up_the_failures():
    for kind in Kind:
        action = decide(kind, over=False, failures_left=False)
        assert (action is not decide(kind, over=False)) is (kind is Kind.USER)
    assert decide(Kind.USER, over=False, failures_left=False) is Action.GIVE_UP
    assert decide(Kind.USER, over=True, failures_left=False) is Action.WAIT
