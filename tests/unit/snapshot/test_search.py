"""The search for the freshest state: candidates, agreement, and the order of trial."""

from __future__ import annotations

import re

import pytest

from torchelastic.errors import SnapshotError
from torchelastic.snapshot.layout import SHARED, own, shard
from torchelastic.snapshot.messages import InventoryItem
from torchelastic.snapshot.search import (
    Agreement,
    Node,
    Outcome,
    SearchReport,
    StoredCheckpoint,
    agreed,
    bases,
    checkers,
    choices,
    finders,
    is_reachable,
    lacking,
    own_version,
    search_together,
    source,
    tellers,
    without_shards,
)


def holding(text, size):
    """`s5` the shared piece of version (0, 5), `2.s5` of (2, 5), `r1.5` rank 1's own of (0, 5), and
    `p1.5` its shards."""
    pattern = r"(?:(\d+)\.)?(?:s|([rp])(\d+)\.)(\d+)"
    generation, kind, rank, step = re.fullmatch(pattern, text).groups()
    piece = SHARED if rank is None else {"r": own, "p": shard}[kind](int(rank))
    return InventoryItem(piece, (int(generation or 0), int(step)), 8, int(rank or 0), size)


def nodes(*held, size=2, peers=True):
    """One node for each text of holdings, a rank each."""
    return {
        f"n{number}": Node(
            f"host{number}:1" if peers else "",
            tuple(holding(word, size) for word in text.split()),
            number,
        )
        for number, text in enumerate(held)
    }


TABLE = [
    ("nothing at all", ("", ""), []),
    ("own pieces alone are of no use", ("r0.4", "r1.4"), []),
    ("all have the same two", ("s4 s5 r0.4 r0.5", "s4 s5 r1.4 r1.5"), [(0, 5), (0, 4)]),
    ("one is torn on one node", ("s4 r0.4 r0.5", "s4 s5 r1.4 r1.5"), [(0, 5), (0, 4)]),
    ("rank 1 had not got to 5", ("s4 s5 r0.4 r0.5", "s3 s4 r1.3 r1.4"), [(0, 4), (0, 5), (0, 3)]),
    ("rank 1's are gone", ("s4 s5 r0.4 r0.5", ""), [(0, 5), (0, 4)]),
    ("rank 1's replica is behind", ("s4 s5 r0.4 r0.5 r1.2", ""), [(0, 5), (0, 4)]),
    ("rank 1's replica is here", ("s4 s5 r0.4 r0.5 r1.4 r1.5", ""), [(0, 5), (0, 4)]),
    ("generation before step", ("s9 r0.9 r1.9", "1.s7 1.r0.7 1.r1.7"), [(1, 7)]),
    ("whole but of long ago", ("s2 r0.2 r1.2", "5.s80"), [(5, 80), (0, 2)]),
    ("all shards", ("s5 p0.5 r0.5", "s5 p1.5 r1.5"), [(0, 5)]),
    ("rank 1's shards are a version behind", ("s5 s4 p0.5 p0.4", "s5 s4 p1.4"), [(0, 4)]),
    ("shards of the lost node are here", ("s5 p0.5 p1.5 r0.5 r1.5", ""), [(0, 5)]),
    ("shards of the lost node are gone", ("s5 p0.5 r0.5", ""), []),
    ("that step was not done again", ("s4 s5", "2.s6"), [(2, 6), (0, 5), (0, 4)]),
    ("whole but three versions behind", ("s5 s4", "s3 r0.3 r1.3"), [(0, 5), (0, 4), (0, 3)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("held", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_bases_of_held_pieces_are_ordered_by_use(held, expected):
    assert bases(nodes(*held), 2) == expected


def test_bases_of_sharded_state_include_versions_with_lost_pieces():
    """Other ranks may have written the same shards."""
    assert bases(nodes("s5 s4 p0.5 p0.4", "s5 s4 p1.4"), 2, sharded=True) == [(0, 5), (0, 4)]


def test_bases_of_another_world_size_prefer_the_finished_step():
    """Rank 0's node is lost, and its replica is a step behind: only a world as large as before
    redoes that step with the same bits."""
    held = ("s4 s5 r0.4 r1.4 r1.5",)
    assert bases(nodes(*held), 2) == [(0, 4), (0, 5)]
    assert bases(nodes(*held), 1) == [(0, 5), (0, 4)]
    assert bases(nodes(*held), 3) == [(0, 5), (0, 4)]


def test_bases_of_sharded_state_exclude_unreachable_versions():
    assert bases(nodes("s5 r0.5", "s4 r1.4", peers=False), 2, sharded=True) == []
    assert bases(nodes("s4 s5", "s4", peers=False), 2, sharded=True) == [(0, 4)]
    assert bases(nodes("s5 r0.5", peers=False), 1, sharded=True) == [(0, 5)]
    assert not is_reachable({}, SHARED, (0, 1))


def test_bases_of_replicated_state_need_one_holder():
    assert bases(nodes("s5 r0.5", "s4 r1.4", peers=False), 2) == [(0, 5), (0, 4)]


#: The checkpoint, if it is beyond a step.
S = StoredCheckpoint


@pytest.mark.parametrize(
    ("versions", "stored", "expected"),
    [
        ([], None, [S()]),
        ([], 7, [S()]),
        ([(0, 3), (0, 2)], None, [(0, 3), (0, 2), S()]),
        # The room was refused at step 3, and training went on: what is stored is fresher.
        ([(0, 3), (0, 2)], 30, [S(3), (0, 3), (0, 2), S()]),
        ([(4, 90), (4, 89)], 80, [(4, 90), (4, 89), S()]),
        ([(4, 90), (4, 89)], 90, [(4, 90), S(89), (4, 89), S()]),
        # The step before is preferred for its random states, not for want of the step.
        ([(0, 4), (0, 5), (0, 3)], 5, [(0, 4), (0, 5), S(3), (0, 3), S()]),
        ([(0, 4), (0, 5), (0, 3)], 6, [S(5), (0, 4), (0, 5), (0, 3), S()]),
        ([(0, 1)], 0, [(0, 1), S()]),
    ],
)
def test_choices_of_memory_and_storage_are_ordered_by_step(versions, stored, expected):
    assert choices(versions, stored) == expected


@pytest.mark.parametrize(
    ("versions", "stored", "start", "expected"),
    [
        ([], None, 50, [S(49)]),
        ([], 40, 50, [S(49)]),
        ([], 60, 50, [S(49)]),
        # Killed between the script's own save of step 50 and commit().
        ([(0, 49), (0, 48)], None, 50, [S(49)]),
        ([(0, 50), (0, 49)], None, 50, [(0, 50), S(49)]),
        # Restarted: the file is older than what is in memory.
        ([(3, 60), (3, 59)], None, 50, [(3, 60), (3, 59), S(49)]),
        ([(3, 60), (3, 59)], 70, 50, [S(60), (3, 60), (3, 59), S(49)]),
        ([(0, 3)], 30, 50, [S(49)]),
        ([(0, 3)], None, 0, [(0, 3), S()]),
    ],
)
def test_choices_with_a_loaded_state_exclude_older_ones(versions, stored, start, expected):
    assert choices(versions, stored, start) == expected


F, A, U = Outcome.FOUND, Outcome.ABSENT, Outcome.UNUSABLE


@pytest.mark.parametrize(
    ("outcomes", "holding", "replicated", "sharded"),
    [
        ([F, F], "n0 n1", Agreement.LOAD, Agreement.LOAD),
        ([F, A], "n0", Agreement.LOAD, Agreement.TRY_AGAIN),  # no room on a small node
        ([F, U], "n0 n1", Agreement.LOAD, Agreement.PASS_OVER),  # damaged on one node
        ([A, A], "n0", Agreement.TRY_AGAIN, Agreement.TRY_AGAIN),
        ([U, A], "n0", Agreement.PASS_OVER, Agreement.TRY_AGAIN),  # the only one is damaged
        ([U, A], "n0 n1", Agreement.TRY_AGAIN, Agreement.TRY_AGAIN),
        ([U, U], "n0 n1", Agreement.PASS_OVER, Agreement.PASS_OVER),
        ([U, U], "n0", Agreement.PASS_OVER, Agreement.PASS_OVER),
    ],
)
def test_agreed_on_reports_of_all_ranks_gives_one_action(outcomes, holding, replicated, sharded):
    said = [SearchReport(one, f"n{rank}") for rank, one in enumerate(outcomes)]
    assert agreed(said, holding.split(), sharded=False) is replicated
    assert agreed(said, holding.split(), sharded=True) is sharded


def test_checkers_of_doubted_pieces_are_one_rank_per_node():
    said = [
        SearchReport(A, "n0"),
        SearchReport(F, "n0", True),
        SearchReport(F, "n0", True),
        SearchReport(F, "n1", True),
    ]
    assert finders(said) == [1, 2, 3]
    assert checkers(said) == [1, 3]
    assert checkers([SearchReport(F, "n0"), SearchReport(F, "n1")]) == []


@pytest.mark.parametrize(
    ("size", "written", "held", "expected"),
    [
        (2, 2, "s5 r0.5 r1.5", []),
        (2, 2, "s5 r0.5", [1]),
        (1, 2, "s5 r0.5", []),  # smaller than it was: rank 1 is nobody's
        (4, 2, "s5 r0.5 r1.5", []),  # larger: ranks 2 and 3 never had any
        (4, 3, "s5 r2.5", [0, 1]),
        (2, 2, "s4 r0.4 r1.4", []),  # nothing of that version: no rank had anything
    ],
)
def test_lacking_lists_ranks_with_lost_own_pieces(size, written, held, expected):
    assert lacking(nodes(held, "", size=written), (0, 5), size) == expected


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ("s5 r1.3 r1.4 r1.5", (0, 5)),
        ("s5 r1.3 r1.4", (0, 4)),
        ("s5 r0.5", None),
        ("2.s5 r1.4 1.r1.6", (0, 4)),  # step 6 was done again
    ],
)
def test_own_version_of_an_unwritten_piece_is_the_one_before(held, expected):
    world = nodes("s4", held)
    freshest = max(item.version for item in world["n1"].holdings if item.piece == SHARED)
    assert own_version(world, 1, freshest, "n0") == expected
    assert own_version(world, 2, freshest, "n0") is None, "it was not in that world"


def test_source_of_a_piece_is_here_or_differs_between_nodes_and_attempts():
    assert source(nodes("s5", "s5"), "n1", SHARED, (0, 5)) == "n1", "here, if it is here"
    assert source(nodes("s5", ""), "n1", own(0), (0, 5)) is None, "nobody has it"
    world, lack = nodes("s5", "", "s5", "", "", "s4"), ["n1", "n3", "n4", "n5"]
    asked = [source(world, name, SHARED, (0, 5)) for name in lack]
    assert asked == ["n0", "n2", "n0", "n2"], "those who lack it do not all ask the same"
    asked = [source(nodes("s5", "", "s5"), "n1", SHARED, (0, 5), tried) for tried in range(3)]
    assert asked == ["n0", "n2", "n0"], "who has tried one in vain asks another"


def test_without_shards_lists_versions_with_lost_shards():
    assert without_shards(nodes("s5 s4 p0.5 p0.4", "s5 s4 p1.4")) == [(0, 5)]
    assert without_shards(nodes("s5 r0.5", "s5 r1.5")) == []


def test_tellers_of_shards_are_one_rank_per_piece():
    world = nodes("s5 p1.5", "s5 p0.5 p1.5 p2.4", "p2.5", size=3)
    assert tellers(world, (0, 5)) == {shard(0): 1, shard(1): 0, shard(2): 2}


# --- the search -----------------------------------------------------------------------------------


class Scripted:
    """A state of one rank of two: what it finds of each version, and the step in storage."""

    def __init__(self, finds, stored):
        self.finds, self.stored, self.calls = finds, stored, []

    def look(self, version):
        self.calls.append(f"look {version[1]}")
        return SearchReport(self.finds[version], "n0", sentence=f"step {version[1]} is damaged")

    def load(self, version, said):
        self.calls.append(f"load {version[1]}")

    def drop(self):
        self.calls.append("drop")

    def from_storage(self, beyond):
        self.calls.append(f"storage beyond {beyond}")
        return self.stored if self.stored is not None and self.stored > beyond else None


V5, V4 = (0, 5), (0, 4)


@pytest.mark.parametrize(
    ("finds", "stored", "base", "calls"),
    [
        ({V5: F, V4: F}, None, V5, "look 5, load 5"),
        ({V5: U, V4: F}, None, V4, "look 5, drop, look 4, load 4"),
        ({V5: U, V4: U}, 3, (-1, 3), "look 5, drop, look 4, drop, storage beyond -1"),
        ({V5: U, V4: U}, None, None, "look 5, drop, look 4, drop, storage beyond -1"),
        ({V5: F, V4: F}, 9, (-1, 9), "storage beyond 5"),
        ({}, None, None, "storage beyond -1"),
        ({}, 0, (-1, 0), "storage beyond -1"),
    ],
    ids=["newest", "newest damaged", "all damaged", "nothing else", "stored", "empty", "step 0"],
)
@pytest.mark.parametrize("sharded", [True, False])
def test_search_loads_the_first_usable_candidate(finds, stored, base, calls, sharded):
    held = nodes(*[" ".join(f"s{step}" for _, step in finds)] * 2)
    state = Scripted(finds, stored)
    tried = choices(sorted(finds, reverse=True), stored)
    found = search_together(tried, state, lambda said: [said] * 2, held, sharded=sharded)
    assert found[0] == base
    assert state.calls == calls.split(", ")
    assert found[1] == (
        "rank 0 cannot use the newest (step 5 is damaged)" if U in finds.values() else ""
    )


def test_search_of_a_version_that_one_rank_found_loads_it_unless_sharded():
    def other_rank_lacks_it(said):
        return [said, SearchReport(A, "n1").to_json()]

    held, state = nodes("s5", ""), Scripted({V5: F}, None)
    assert search_together([V5], state, other_rank_lacks_it, held, sharded=False) == (V5, "")
    with pytest.raises(SnapshotError, match="rank 1 could not fetch it"):
        search_together([V5], state, other_rank_lacks_it, held, sharded=True)
    assert state.calls == ["look 5", "load 5", "look 5", "drop"]


@pytest.mark.parametrize("sharded", [True, False])
def test_search_ends_with_an_error_if_a_version_is_absent(sharded):
    state = Scripted({V5: A}, 3)
    with pytest.raises(SnapshotError, match="Step 5 is in memory, but rank 0 could not fetch it"):
        search_together([V5], state, lambda said: [said] * 2, nodes("s5", ""), sharded=sharded)
    assert state.calls == ["look 5", "drop"], "neither an older version nor storage is tried"
