"""Whole replicas: blocks of workers, places of nodes, and the worlds that are made of them."""

from __future__ import annotations

import doctest

import pytest

from tests.unit.rendezvous.cast import Job, failure, seen
from torchelastic.config import WorldSizes
from torchelastic.errors import EXIT_USAGE
from torchelastic.rendezvous import choosing, replicas, round_state
from torchelastic.rendezvous.round_state import RoundRules, RoundState
from torchelastic.rendezvous.world import Member


def test_doctests_hold():
    assert doctest.testmod(replicas).failed == 0


# --- the pure parts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "nproc", "flag", "job", "sentence"),
    [
        (0, 3, 0, 0, ""),
        (1, 3, 0, 1, ""),
        (2, 4, 0, 2, ""),
        (4, 4, 0, 4, ""),
        (4, 2, 4, 4, ""),
        (3, 4, 0, 3, "not a divisor of its 4 workers"),
        (4, 2, 0, 4, "--replica-size 4"),
        (2, 2, 4, 2, "but --replica-size is 4"),
        (0, 2, 4, 0, "made no mesh, but --replica-size is 4"),
        (2, 4, 0, 4, "but those of other nodes made one of 4 workers"),
        (2, 4, 0, 0, "but those of other nodes made none"),
    ],
)
def test_a_mesh_fits_the_node_and_the_job_or_the_sentence_says_why(
    mesh, nproc, flag, job, sentence
):
    found = replicas.mesh_misfit(mesh, nproc, flag=flag, job=job)
    assert sentence in found
    assert bool(sentence) == bool(found)


@pytest.mark.parametrize(
    ("ranks", "size", "blocks"),
    [
        ([], 2, []),
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([1, 2, 3], 2, [(2, 3)]),
        ([0, 2, 3, 1], 4, [(0, 1, 2, 3)]),
        ([1, 2], 2, []),
    ],
)
def test_whole_blocks(ranks, size, blocks):
    assert replicas.whole_blocks(ranks, size) == blocks


@pytest.mark.parametrize(
    ("new", "places", "spanned", "allotted"),
    [
        ("abcd", {}, 2, {"a": 0, "b": 1, "c": 0, "d": 1}),
        ("c", {"a": 0, "b": 0}, 2, {"c": 1}),
        ("cd", {"a": 2}, 3, {"c": 0, "d": 1}),
        ("", {"a": 2}, 3, {}),
    ],
)
def test_a_new_node_gets_the_place_with_the_fewest_nodes(new, places, spanned, allotted):
    assert replicas.allot(dict.fromkeys(new), places, spanned) == allotted


def test_a_static_rank_has_its_place():
    assert replicas.allot({"a": 3, "b": 0, "c": None}, {}, 2) == {"a": 1, "b": 0, "c": 0}


@pytest.mark.parametrize(
    ("places", "movable", "most", "moved"),
    [
        ({"a": 0, "b": 1}, "ab", 9, {}),  # nothing is gained
        ({"a": 0, "c": 0}, "c", 9, {"c": 1}),
        ({"a": 0, "c": 0, "e": 0, "d": 1}, "e", 9, {"e": 1}),
        ({"a": 0, "c": 0, "e": 0, "d": 1}, "", 9, {}),  # all others are in a world
        ({"a": 0, "c": 0, "e": 0, "d": 1}, "e", 1, {}),  # --nnodes allows no more replicas
        ({"a": 0, "c": 0, "e": 0}, "ec", 9, {"e": 1}),
        ({"a": 0, "b": 0, "c": 0, "d": 0, "e": 1}, "dcba", 9, {"d": 1}),
    ],
)
def test_a_spare_moves_if_one_more_replica_is_then_whole(places, movable, most, moved):
    assert replicas.moves(places, list(movable), 2, most) == moved


@pytest.mark.parametrize(
    ("nodes", "last", "order"),
    [
        ("a0 b1 c0 d1", "", "abcd"),
        ("a0 c0 b1 d1", "", "abcd"),
        ("a0 b1 c0 d1", "ab cd", "abcd"),
        ("a0 d1 c0 b1", "ad cb", "adcb"),  # they stay together
        ("b1 c0 d1 e0", "ab cd", "ebcd"),  # e takes the place of a
        ("a0 d1", "ab cd", "ad"),  # broken replicas are combined
        ("c0 d1", "ab cd", "cd"),
    ],
)
def test_replicas_stay_together_and_broken_ones_are_combined(nodes, last, order):
    ranks = {node: rank for rank, node in enumerate(last.replace(" ", ""))}
    pairs = [(text[0], int(text[1])) for text in nodes.split()]
    assert "".join(replicas.arranged(pairs, ranks, 2)) == order


# --- a job ---------------------------------------------------------------------------------------


class ShardedJob(Job):
    """Its nodes take the places that the leader allots."""

    def settle(self) -> None:
        super().settle()
        while places := choosing.to_allot(self.rules, self.state):
            self.state = round_state.allotted(self.state, places)
            for name, place in places.items():
                member, _ = self.records[name]
                again = {"standing": ()} if member.place >= 0 and member.in_process else {}
                self.say(name, place=place, **again)

    @property
    def ranks(self) -> str:
        """`a01 b0`: the nodes of the world with the local ranks of their workers."""
        return " ".join(
            f"{node.name}{''.join(map(str, node.local_ranks))}" for node in self.world.nodes
        )

    def enlist(self, mesh: int) -> None:
        for name in self.names:
            nproc = self.records[name][0].nproc
            self.say(name, in_process=True, standing=tuple(range(nproc)), replica=mesh)

    def pause(self) -> None:
        """All nodes of a pausing world report their step."""
        assert self.world.phase == "pausing"
        for name in self.names:
            self.say(name, paused=self.world.generation, entered=5)


def sharded(nnodes: str, nodes: str, mesh: int, nproc: int, **rules) -> ShardedJob:
    """A job that trains on these nodes."""
    job = ShardedJob(nnodes, **rules)
    job.come(*nodes, nproc=nproc)
    job.wait(1.0)
    job.enlist(mesh)
    assert (job.world.phase, job.world.in_process, job.world.replica) == ("running", True, mesh)
    return job


def test_a_mesh_makes_replicas_of_one_node():
    job = sharded("1:4", "ab", mesh=2, nproc=4)
    assert job.ranks == "a0123 b0123"
    assert job.world.size == 8


@pytest.mark.parametrize(
    ("rules", "meshes", "sentence"),
    [
        ({}, (4, 4), "a: its workers made a mesh of 4 workers, which is not a divisor of its 2"),
        ({}, (2, 0), "b: its workers made no mesh, but those of other nodes made one of 2"),
        ({"replica_size": 4}, (2, 2), "but --replica-size is 4"),
    ],
)
def test_meshes_that_make_no_replicas_end_the_job(rules, meshes, sentence):
    job = ShardedJob("2:2", **rules)
    job.come("a", "b")
    for name, mesh in zip("ab", meshes, strict=True):
        job.say(name, in_process=True, standing=(0, 1), replica=mesh)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_USAGE)
    assert sentence in job.world.reason


def test_a_block_without_all_of_its_workers_is_left_out_until_its_replacement_stands():
    job = sharded("1:4", "ab", mesh=2, nproc=4)
    job.say("a", failures=(failure("a", local_rank=1),), standing=(0, 2, 3), starting=1)
    job.all_gone()
    assert (job.world.phase, job.ranks, job.world.size) == ("running", "a23 b0123", 6)
    job.say("a", standing=(0, 1, 2, 3), starting=0)
    job.wait(1.0)
    job.pause()
    assert (job.ranks, job.world.after) == ("a0123 b0123", 5)


def test_a_node_without_a_whole_block_has_no_place_and_comes_back():
    job = sharded("1:4", "ab", mesh=2, nproc=2)
    job.say("a", failures=(failure("a", local_rank=1),), standing=(0,), starting=1)
    job.all_gone()
    assert job.ranks == "b01"
    job.say("a", standing=(0, 1), starting=0)
    job.wait(1.0)
    job.pause()
    assert job.ranks == "b01 a01"


@pytest.mark.parametrize(
    ("lost", "waits"),
    [
        pytest.param((1, 0), True, id="each part is left on one node"),
        pytest.param((1, 1), False, id="a part is lost"),
    ],
)
def test_a_repaired_replica_waits_for_one_that_has_its_lost_part(lost, waits):
    job = sharded("1:4", "ab", mesh=2, nproc=2)
    for name, rank in zip("ab", lost, strict=True):
        left = (1 - rank,)
        failed = (failure(name, local_rank=rank),)
        job.say(name, failures=failed, standing=left, starting=1, holds=0)
    job.all_gone()
    job.say("a", standing=(0, 1), starting=0, blank=(lost[0],))
    assert (job.world.phase == "waiting") is waits
    job.say("b", standing=(0, 1), starting=0, blank=(lost[1],))
    if waits:
        assert (job.world.phase, job.ranks) == ("running", "a01 b01")


def test_job_without_a_whole_replica_waits_and_says_why():
    job = sharded("1:4", "a", mesh=2, nproc=2)
    job.say("a", failures=(failure("a", local_rank=1),), standing=(0,), starting=1)
    job.all_gone()
    assert job.world.phase == "waiting"
    assert "no whole replica: a lacks rank 1" in job.world.reason
    assert job.world.enough, "its replacement is starting"
    job.say("a", standing=(0, 1), starting=0)
    assert (job.world.phase, job.ranks) == ("running", "a01")


@pytest.mark.parametrize(
    ("sizes", "nodes", "ranks"),
    [
        ("multiple:1", "abc", "a01 b01 c01"),
        ("multiple:4", "abc", "a01 b01"),
        ("2,4", "abc", "a01 b01"),
        ("2", "abc", "a01"),
    ],
)
def test_world_sizes_count_workers_of_whole_replicas(sizes, nodes, ranks):
    job = ShardedJob("1:4", world_sizes=WorldSizes.parse(sizes), replica_size=2)
    job.come(*nodes)
    job.wait(1.0)
    assert (job.ranks, job.world.replica) == (ranks, 2)
    job.enlist(2)
    assert job.world.in_process
    job.say("a", failures=(failure("a"),), standing=(1,), starting=1)
    job.all_gone()
    assert all(len(node.local_ranks) == 2 for node in job.world.nodes)


# --- replicas that span nodes --------------------------------------------------------------------


def spanning(nodes: str = "abcd", nnodes: str = "1:4", **rules) -> ShardedJob:
    return sharded(nnodes, nodes, mesh=2, nproc=1, replica_size=2, **rules)


def coordinates_hold(job: ShardedJob) -> bool:
    """Rank r has the coordinate r % 2 for which its workers started."""
    return all(
        node.first_rank % 2 == job.records[node.name][0].place == node.node_rank % 2
        for node in job.world.nodes
    )


@pytest.mark.parametrize(
    ("nnodes", "nodes", "world"),
    [
        ("1:4", "abcd", "a0 b0 c0 d0"),
        ("1:4", "abc", "a0 b0"),
        ("1:3", "abcd", "a0 b0"),
        ("3:4", "abcd", "a0 b0 c0 d0"),
        ("1:2", "abcd", "a0 b0"),
    ],
)
def test_a_world_has_whole_replicas_and_the_rest_are_spares(nnodes, nodes, world):
    job = ShardedJob(nnodes, replica_size=2)
    job.come(*nodes, nproc=1)
    job.wait(1.0)
    assert (job.ranks, job.world.size) == (world, world.count(" ") + 1)
    assert coordinates_hold(job)


@pytest.mark.parametrize(("nnodes", "nodes"), [("1:4", "a"), ("3:4", "abc")])
def test_too_few_nodes_for_a_whole_replica_wait(nnodes, nodes):
    job = ShardedJob(nnodes, replica_size=2)
    job.come(*nodes, nproc=1)
    job.wait(5.0)
    assert job.world.phase == "waiting"
    assert "whole replicas of 2" in job.world.reason


def test_a_lost_node_takes_its_partner_out_of_the_world():
    job = spanning()
    job.die("b")
    job.all_gone()
    assert (job.ranks, job.world.spares) == ("c0 d0", ("a",))
    job.come("e", nproc=1, in_process=True)
    assert job.records["e"][0].place == 1
    job.say("e", standing=(0,))
    job.wait(1.0)
    job.pause()
    assert job.ranks == "c0 d0 a0 e0"
    assert coordinates_hold(job)


def test_two_broken_replicas_are_combined():
    job = spanning()
    job.die("b", "c")
    job.all_gone()
    assert job.ranks == "a0 d0"
    assert coordinates_hold(job)


def test_a_spare_with_the_same_place_takes_over_at_once():
    job = spanning("abcdef")
    assert job.ranks == "a0 b0 c0 d0"
    for name in "ef":
        job.say(name, in_process=True, standing=(0,))
    job.die("b")
    job.all_gone()
    assert job.ranks == "a0 f0 c0 d0"
    assert coordinates_hold(job)


def test_a_spare_moves_to_the_place_that_is_short():
    job = spanning("abcde")
    job.say("e", in_process=True, standing=(0,))
    assert job.records["e"][0].place == 0
    job.die("b")
    job.all_gone()
    assert job.ranks == "c0 d0"
    assert job.records["e"][0].place == 1, "its workers start again there"
    job.say("e", standing=(0,))
    job.wait(1.0)
    job.pause()
    assert len(job.names) == 4
    assert coordinates_hold(job)


def having(*members: dict) -> RoundState:
    """The state with these members, named a, b, ..., whose workers stand by."""
    state = RoundState()
    for number, fields in enumerate(members):
        name = "abc"[number]
        who = {"node": name, "name": name, "addr": name, "ready": True, "in_process": True}
        member = Member(**who, standing=tuple(range(fields["nproc"])), **fields)
        state = seen(state, member, number, 0.0)
    return state


@pytest.mark.parametrize(
    ("own", "other", "moved"),
    [(5, -1, {}), (0, -1, {}), (5, 5, {"a": 1}), (3, 5, {"a": 1}), (-1, -1, {"a": 1})],
)
def test_node_that_alone_has_newest_state_of_its_place_does_not_move(own, other, moved):
    """b, of the same place, may not move: it has a static rank."""
    at_place = {"nproc": 1, "place": 0}
    state = having({**at_place, "holds": own}, {**at_place, "holds": other, "node_rank": 0})
    rules = RoundRules(min_nodes=1, max_nodes=4, replica_size=2)
    assert choosing.to_allot(rules, state) == moved


@pytest.mark.parametrize(
    ("holds", "blank", "chosen"), [(5, (), "a"), (5, (1,), "b"), (7, (1,), "b"), (7, (0,), "b")]
)
def test_node_with_a_replaced_worker_comes_after_one_with_a_whole_replica(holds, blank, chosen):
    state = having({"nproc": 2, "holds": holds, "blank": blank}, {"nproc": 2, "holds": 5})
    rules = RoundRules(min_nodes=1, max_nodes=1, replica_size=2)
    ordered = choosing.in_order(choosing.candidates(rules, state), None)
    assert [offer.node for offer in choosing.choose(rules, ordered, state)] == [chosen]


def test_a_node_that_moves_is_in_no_world_before_it_says_so():
    job = spanning("abcde")
    job.say("e", in_process=True, standing=(0,))
    rules, state = job.rules, round_state.allotted(job.state, {"e": 1})
    assert "e" not in [offer.node for offer in choosing.candidates(rules, state)]
    assert "e" in [offer.node for offer in choosing.candidates(rules, job.state)]


def test_the_last_holder_of_a_place_is_in_the_next_world_slow_or_not():
    rules = RoundRules(min_nodes=1, max_nodes=2, replica_size=2)
    job = spanning("abcd", "1:2")
    for name in "ab":
        job.say(name, holds=0)
    for name in "cd":
        job.say(name, in_process=True, standing=(0,))
    job.state = round_state.slow_seen(job.state, {"a"})
    ordered = choosing.in_order(choosing.candidates(rules, job.state), job.world)
    assert [offer.node for offer in choosing.choose(rules, ordered, job.state)] == ["a", "b"]


def test_a_leaving_node_hands_its_shard_over_to_a_new_replica():
    job = spanning("ab")
    job.come("c", "d", nproc=1, in_process=True)
    job.say("a", leaving="SIGTERM")
    for name in "cd":
        job.say(name, standing=(0,))
    assert job.world.phase == "pausing"
    job.pause()
    assert job.ranks == "a0 b0 c0 d0", "one more world, in which c gets what a has"
    job.pause()
    assert job.ranks in ("c0 b0", "c0 d0")
    assert coordinates_hold(job)


@pytest.mark.parametrize(
    ("nproc", "size", "nnodes", "sizes", "nodes", "broken", "found"),
    [
        (4, 2, "1:4", "multiple:1", 3, 0, (6, 3)),
        (4, 2, "1:4", "multiple:1", 3, 1, (5, 3)),
        (4, 4, "1:4", "multiple:1", 3, 1, (2, 2)),
        (4, 4, "1:4", "4,16", 3, 0, (1, 1)),
        (2, 4, "1:4", "multiple:1", 4, 0, (2, 4)),
        (2, 4, "1:4", "multiple:1", 3, 0, (1, 2)),
        (2, 4, "1:3", "multiple:1", 4, 0, (1, 2)),
        (2, 4, "3:4", "multiple:1", 3, 0, (0, 0)),
        (2, 4, "1:8", "multiple:8", 7, 0, (2, 4)),
    ],
)
def test_the_table_of_the_guide(nproc, size, nnodes, sizes, nodes, broken, found):
    """docs/guides/sharded-train.md: how many replicas, on how many nodes."""
    job = ShardedJob(nnodes, replica_size=size, world_sizes=WorldSizes.parse(sizes))
    names = "abcdefgh"[:nodes]
    for name, place in zip(names, range(nodes), strict=True):
        place = place % (size // nproc) if size > nproc else -1
        missing = broken and name == "a"
        job.come(
            name,
            nproc=nproc,
            place=place,
            in_process=True,
            standing=tuple(range(bool(missing), nproc)),
            replica=size,
        )
    job.wait(1.0)
    world = job.world
    made = (world.size // size, world.count) if world.phase == "running" else (0, 0)
    assert made == found
