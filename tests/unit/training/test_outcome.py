"""Which exception leads to what: every cell of the table."""

import pytest

from torchelastic.errors import NonRetryableException, StopException, UnfitError
from torchelastic.training.group import GenerationOver, PeerLostError
from torchelastic.training.outcome import TABLE, Action, Kind, Where, chain, decide, kind_of


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


@pytest.mark.parametrize("where", [Where.SYNC, Where.BETWEEN])
def test_no_data_is_ended_outside_of_a_step(where):
    assert kind_of(StopIteration(), where) is Kind.USER
    assert kind_of(leaked(), where) is Kind.USER


def test_building_is_not_user_code():
    assert kind_of(RuntimeError("connection refused"), Where.BUILD) is Kind.PEER_LOST
    assert kind_of(GenerationOver(), Where.BUILD) is Kind.OVER
    assert kind_of(KeyboardInterrupt(), Where.BUILD) is Kind.EXIT
    assert kind_of(UnfitError(), Where.BUILD) is Kind.UNFIT


def test_a_chain_may_be_a_ring():
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert {*chain(first)} == {first, second}
    assert kind_of(first, Where.STEP) is Kind.USER


def test_the_table_is_whole():
    assert {*TABLE} == {*Kind}
    assert {action for actions in TABLE.values() for action in actions} == {*Action}


@pytest.mark.parametrize(
    ("kind", "standing", "over"),
    [
        (Kind.OVER, Action.WAIT, Action.WAIT),
        (Kind.PEER_LOST, Action.HINT, Action.WAIT),
        (Kind.USER, Action.RETRY, Action.WAIT),
        (Kind.END_OF_DATA, Action.FINISH, Action.WAIT),
        (Kind.STOP, Action.FINISH, Action.WAIT),
        (Kind.FATAL, Action.GIVE_UP, Action.GIVE_UP),
        (Kind.UNFIT, Action.WITHDRAW, Action.WITHDRAW),
        (Kind.EXIT, Action.RAISE, Action.RAISE),
    ],
    ids=lambda value: value.name,
)
def test_what_is_done(kind, standing, over):
    assert decide(kind, over=False) is standing
    assert decide(kind, over=True) is over


def test_only_errors_of_user_code_use_up_the_failures():
    for kind in Kind:
        action = decide(kind, over=False, failures_left=False)
        assert (action is not decide(kind, over=False)) is (kind is Kind.USER)
    assert decide(Kind.USER, over=False, failures_left=False) is Action.GIVE_UP
    assert decide(Kind.USER, over=True, failures_left=False) is Action.WAIT
