"""The slate: what is published is held whole or not at all, by whoever looks."""

import os

import pytest

from torchelastic.worker import slate as slates


@pytest.fixture
def descriptor():
    made = slates.create()
    yield made
    os.close(made)


@pytest.fixture
def slate(descriptor):
    made = slates.Slate(descriptor)
    yield made
    made.close()


def seen(descriptor):
    """What another process finds."""
    other = slates.Slate(descriptor)
    try:
        return [other.held(slot) for slot in range(slates.SLOTS)]
    finally:
        other.close()


def test_an_empty_slate_holds_nothing(descriptor):
    assert seen(descriptor) == [None] * slates.SLOTS


def test_what_is_steady_is_held_before_what_changes(descriptor, slate):
    assert slate.publish(1, (2, 3), b"cde", b"ab")
    assert seen(descriptor)[1] == ((2, 3), b"abcde")
    assert slate.publish(1, (2, 4), b"xy")
    assert seen(descriptor)[1] == ((2, 4), b"xy")


def test_what_is_there_already_is_not_written_and_is_held(descriptor, slate):
    steady = [b"same" * 100, b"SAME" * 100]
    for number in range(8):
        same, other = steady[number // 2 % 2], b"%d" % (number // 4 * 1000)
        slate.publish(0, (0, number), other, same)
        assert seen(descriptor)[0] == ((0, number), same + other)


def test_slots_keep_what_they_hold_when_one_grows(descriptor, slate):
    for slot in range(slates.SLOTS):
        slate.publish(slot, (0, slot), b"%d" % slot)
    slate.publish(2, (0, 9), b"x" * 50_000)
    held = seen(descriptor)
    assert held[2] == ((0, 9), b"x" * 50_000)
    others = [slot for slot in range(slates.SLOTS) if slot != 2]
    assert [held[slot] for slot in others] == [((0, slot), b"%d" % slot) for slot in others]
    slate.publish(1, (0, 10), b"new")
    assert seen(descriptor)[1] == ((0, 10), b"new")


def test_too_much_is_refused_and_what_was_there_stays(descriptor, slate, monkeypatch):
    monkeypatch.setattr(slates, "SLOT_LIMIT", 10)
    slate.publish(0, (0, 1), b"few")
    assert not slate.publish(0, (0, 2), b"too many bytes")
    assert seen(descriptor)[0] == ((0, 1), b"few")


def test_a_torn_slot_is_none_until_the_next_worker_has_written_it(descriptor, slate):
    slate.publish(0, (0, 1), b"whole")
    slate._memory[slate._begin(0)] |= 1
    assert seen(descriptor)[0] is None
    successor = slates.Slate(descriptor)
    successor.publish(0, (1, 1), b"again")
    assert successor.held(0) == ((1, 1), b"again")
    successor.close()
