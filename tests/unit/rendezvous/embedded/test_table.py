"""The table where it differs from other stores: leases, history. The contract test has the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rendezvous.embedded_support import a_few_examples
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.transport.frames import Row

NEVER = 1e9


def filled(table: Table, *keys: str) -> Table:
    for key in keys:
        table.put(key, "{}")
    return table


def with_lease(*keys: str, seconds: float = 3.0, now: float = 0.0) -> Table:
    table = Table()
    table.open_lease("L", seconds, now)
    for key in keys:
        table.put(key, "{}", lease="L")
    return table


@pytest.mark.parametrize(
    ("kept_at", "now", "alive"),
    [
        (None, 2.9, True),
        (None, 3.0, False),
        (2.0, 4.9, True),
        (2.0, 5.0, False),
        # Late, but nobody had ended it yet.
        (7.0, 9.9, True),
    ],
)
def test_a_lease_lasts_from_its_last_keep_alive(kept_at, now, alive):
    table = with_lease("a", seconds=3.0)
    if kept_at is not None:
        assert table.keep_alive("L", kept_at)
    ended = table.expire(now)
    assert (ended == {}) is alive
    assert [row.key for row in table.get("")] == (["a"] if alive else [])
    assert table.keep_alive("L", now) is alive


def test_the_end_of_a_lease_deletes_its_keys_in_the_order_they_were_put():
    table = with_lease("b", "a")
    table.put("kept", "{}")
    assert table.expire(NEVER) == {"L": [Row("b", None, 1, 4), Row("a", None, 2, 5)]}
    assert [row.key for row in table.get("")] == ["kept"]
    assert table.expire(NEVER) == {}


def test_deadlines_are_not_kept_for_ever():
    table = with_lease()
    for now in range(100):  # a client whose connection breaks again and again
        table.shorten("L", now + 0.05)
        assert table.keep_alive("L", now)
        assert table.next_deadline() == now + 3.0
    assert len(table._deadlines) < 10


@a_few_examples
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "keep", "shorten", "end"]),
            st.sampled_from("ABC"),
            st.integers(0, 9),
        )
    )
)
def test_the_next_deadline_is_the_earliest_of_all(moves):
    table, deadlines, now = Table(), {}, 0.0
    for move, token, seconds in moves:
        now += 1.0
        if move == "open":
            table.open_lease(token, seconds + 1.0, now)
            deadlines[token] = (now + seconds + 1.0, seconds + 1.0)
        elif move == "keep" and table.keep_alive(token, now):
            deadlines[token] = (now + deadlines[token][1], deadlines[token][1])
        elif move == "shorten" and token in deadlines:
            table.shorten(token, now + seconds)
            deadlines[token] = (min(deadlines[token][0], now + seconds), deadlines[token][1])
        elif move == "end":
            table.end_lease(token)
            deadlines.pop(token, None)
        due = {token for token, (deadline, _) in deadlines.items() if deadline <= now}
        assert set(table.expire(now)) == due
        deadlines = {token: facts for token, facts in deadlines.items() if token not in due}
        assert table.next_deadline() == min((at for at, _ in deadlines.values()), default=None)


def test_a_lease_opened_twice_is_one_lease():
    table = with_lease("a")
    table.open_lease("L", 4.0, 1.0)
    assert table.next_deadline() == 5.0
    assert [row.key for row in table.end_lease("L")] == ["a"]


@pytest.mark.parametrize(("next_lease", "left"), [(None, ["a"]), ("M", ["a"]), ("L", [])])
def test_a_key_belongs_to_the_lease_it_was_last_put_under(next_lease, left):
    table = with_lease("a")
    table.open_lease("M", 3.0, 0.0)
    table.put("a", "{}", lease=next_lease)
    table.end_lease("L")
    assert [row.key for row in table.get("")] == left


def test_unknown_leases_are_ignored():
    table = Table()
    table.shorten("?", 1.0)
    assert not table.keep_alive("?", 0.0)
    assert table.end_lease("?") == []


# ChangeHistory


def test_changes_since_a_revision_come_in_order():
    table = with_lease("m/1", "x", "m/2", "m/1")
    table.end_lease("L")
    changes = table.since("m/", 1)
    assert changes is not None
    assert [(row.key, row.text is None, row.modified) for row in changes] == [
        ("m/2", False, 3),
        ("m/1", False, 4),
        ("m/1", True, 5),
        ("m/2", True, 7),
    ]
    assert table.since("m/", 7) == []


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [
        ("", ["member/1", "world", "member/2", "worldly", "member/1"]),
        ("member/", ["member/1", "member/2", "member/1"]),
        ("member/1", ["member/1", "member/1"]),
        ("world", ["world", "worldly"]),
        ("worldl", ["worldly"]),
        ("w/", []),
    ],
)
def test_changes_under_a_prefix_whatever_it_ends_in(prefix, keys):
    table = filled(Table(), "first", "member/1", "world", "member/2", "worldly", "member/1")
    changes = table.since(prefix, 1)
    assert changes is not None
    assert [row.key for row in changes] == keys
    there = [row.key for row in table.get(prefix) if row.key != "first"]
    assert there == list(dict.fromkeys(keys)), "in order of arrival"


def test_table_watch_beyond_the_history_receives_the_last_change_of_each_key():
    table = Table(history_rows=2)
    table.open_lease("L", 3.0, 0.0)
    table.put("gone", "{}", lease="L")
    filled(table, "a", "b", "a")
    table.end_lease("L")
    changes = table.since("", 1)
    assert changes is not None
    assert [(row.key, row.text) for row in changes] == [("b", "{}"), ("a", "{}"), ("gone", None)]


def test_the_history_is_bounded_by_characters_too():
    table = Table(history_rows=100, history_chars=100)
    for _ in range(10):
        table.put("a", "x" * 60)
    changes = table.since("", 0)
    assert changes is not None
    assert [row.modified for row in changes] == [10]


def test_a_watcher_that_missed_forgotten_deletions_gets_none():
    table = Table(history_rows=1, tombstones=1)
    table.open_lease("L", 3.0, 0.0)
    for key in ("a", "b"):
        table.put(key, "{}", lease="L")
    table.end_lease("L")
    assert table.since("", 2) is None
    assert table.since("", 3) == [Row("b", None, 2, 4)]
    # Who knew nothing has missed nothing.
    assert table.since("", 0) == [Row("b", None, 2, 4)]


def test_a_request_that_comes_again_is_known_by_its_stamp():
    table = Table(history_rows=2)
    table.put("a", "{}", beside={"part/0": "[]"}, stamp="me/1")
    assert table.revision_of("me/1") == table.revision == 2
    assert table.revision_of("me/2") is None
    filled(table, "b", "c")
    assert table.revision_of("me/1") is None


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "leased", "end"])), max_size=30
)


@a_few_examples
@given(steps=STEPS, history=st.integers(0, 8), watched_from=st.integers(0, 30))
def test_a_watcher_who_was_away_ends_up_with_what_is_there(steps, history, watched_from):
    table = Table(history_rows=history)
    known: dict[str, Row] = {}
    seen = 0
    for number, (key, action) in enumerate(steps):
        if action == "end":
            table.end_lease("L")
        else:
            table.open_lease("L", 1.0, 0.0)
            table.put(key, str(number), lease="L" if action == "leased" else None)
        if number == watched_from:
            known, seen = {row.key: row for row in table.get("")}, table.revision
    changes = table.since("", seen)
    assert changes is not None
    assert [row.modified for row in changes] == sorted({row.modified for row in changes})
    for row in changes:
        if row.text is None:
            known.pop(row.key, None)
        else:
            known[row.key] = row
    assert known == {row.key: row for row in table.get("")}
