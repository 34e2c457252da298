"""What a store writes down is what it would be told: replayed, it is the same store."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rendezvous.embedded_support import a_few_examples
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.embedded import state_file
from torchelastic.rendezvous.embedded.state_file import KeptJob, RecordedTable


class Written:
    """A job's table, and what it has written down."""

    def __init__(self):
        self.entries = [["new", "job", "store-1"]]
        self.lasting = [True]
        self.table = RecordedTable("job")
        self.table.record = self._record

    def _record(self, entry, lasting):
        self.entries.append(json.loads(json.dumps(entry)))
        self.lasting.append(lasting)

    def replayed(self, now=100.0):
        return state_file.replay(self.entries, now)["job"]

    def as_snapshot(self):
        kept = {"job": KeptJob("store-1", self.table)}
        return json.loads(json.dumps(state_file.snapshot(kept)))


def same(table, other):
    assert other.revision == table.revision
    assert other.get("") == table.get("")
    assert {key: other.lease_of(key) for key in _keys(other)} == {
        key: table.lease_of(key) for key in _keys(table)
    }
    return True


def _keys(table):
    return [row.key for row in table.get("")]


def test_a_table_that_is_replayed_is_the_same():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", '{"n":1}', lease="L", stamp="c/1")
    written.table.put("world", "{}", expected=0, beside={"part/0": "[]"})
    written.table.end_lease("L")

    kept = written.replayed()

    assert kept.name == "store-1"
    assert kept.table.revision_of("c/1") == 1, "a request that is sent again is known again"
    assert same(written.table, kept.table)
    assert _keys(kept.table) == ["part/0", "world"]


def test_journal_change_without_a_lease_is_synced_before_the_answer():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", "{}", lease="L")
    written.table.put("world", "{}")

    assert [entry[0] for entry in written.entries] == ["new", "open", "put", "put"]
    assert written.lasting == [True, False, False, True]


def test_journal_change_without_effect_is_not_written():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("world", "{}", expected=7)
    written.table.open_lease("L", 3.0, 1.0)
    written.table.keep_alive("L", 1.0)
    written.table.end_lease("of nobody")

    assert [entry[0] for entry in written.entries] == ["new", "open"]


def test_leases_begin_again_and_end_with_their_keys():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", "{}", lease="L")

    for entries in (written.entries, written.as_snapshot()):
        table = state_file.replay(entries, 100.0)["job"].table
        assert table.next_deadline() == 103.0
        assert table.keep_alive("L", 102.0)
        assert not table.expire(103.0)
        assert [row.key for row in table.expire(105.0)["L"]] == ["member/a"]


def test_a_client_that_is_up_to_date_gets_only_new_changes():
    written = Written()
    written.table.put("world", "1")
    written.table.put("world", "2")

    for entries in (written.entries, written.as_snapshot()):
        table = state_file.replay(entries, 0.0)["job"].table
        assert table.since("", 2) == []
        (row,) = table.put("world", "3")
        assert table.since("", 2) == [row]


def test_journal_watcher_behind_a_restart_receives_earlier_deletions():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", "{}", lease="L")
    written.table.end_lease("L")

    table = state_file.replay(written.as_snapshot(), 0.0)["job"].table

    assert [(row.key, row.text) for row in table.since("member/", 1)] == [("member/a", None)]


def test_jobs_are_apart_and_can_be_forgotten():
    entries = [["new", "a", "A"], ["new", "b", "B"], ["put", "a", "world", "{}", None, {}, ""]]

    jobs = state_file.replay(entries, 0.0)
    assert (jobs["a"].table.revision, jobs["b"].table.revision) == (1, 0)
    assert list(state_file.replay([*entries, ["forget", "a"]], 0.0)) == ["b"]


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("xyz"), st.sampled_from([None, "L", "M"])),
    st.tuples(st.just("open"), st.sampled_from("LM"), st.sampled_from([1.0, 2.0])),
    st.tuples(st.just("end"), st.sampled_from("LM"), st.none()),
)


@a_few_examples
@given(st.lists(OPERATIONS), st.integers(0, 20))
def test_journal_replay_after_a_rewrite_at_any_time_gives_the_same_table(operations, whole_after):
    written = Written()
    for number, (what, name, more) in enumerate(operations):
        if what == "open":
            written.table.open_lease(name, more, 0.0)
        elif what == "end":
            written.table.end_lease(name)
        elif more is None or written.table.seconds_of(more) is not None:
            written.table.put(name, str(number), lease=more)
        if number == whole_after:
            written.entries = written.as_snapshot()

    assert same(written.table, written.replayed().table)


# --- lines ---------------------------------------------------------------------------------------


def text(*entries):
    return state_file.heading() + b"".join(map(state_file.line, entries))


def test_a_line_that_was_not_finished_was_never_told():
    assert state_file.parse(text(), "F") == []
    first = ["new", "jöb\n", "A"]
    whole = text(first, ["new", "b", "B"])

    for end in range(len(text(first)), len(whole)):
        assert state_file.parse(whole[:end], "F") == [first]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not a rendezvous state file"),
        (b"import torch\n", "not a rendezvous state file"),
        (b"00000000 {}\n", "not a rendezvous state file"),
        (state_file.line(["something-else", 1]), "not a rendezvous state file"),
        (state_file.line([state_file.FORMAT, 2]), "another version"),
        (text(["new", "a", "A"]).replace(b'"A"', b'"B"'), "damaged .line 2"),
        (text() + b"\n" + state_file.line(["new", "a", "A"]), "damaged .line 2"),
        (text() + state_file.line({"a": 1}), "damaged .line 2"),
    ],
)
def test_journal_foreign_or_damaged_file_is_refused(data, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        state_file.parse(data, "F")

    assert "\n" not in str(refused.value)
