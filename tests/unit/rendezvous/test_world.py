"""Worlds in a summary and parts, and member records."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rendezvous.cast import a_few_examples
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import (
    FAILOVER_CANDIDATES_LIMIT,
    PART_NODES,
    Member,
    World,
    WorldNode,
    addresses_in,
    part_key,
    parts_for,
)

FAILURE = Failure(
    generation=1, node="n", rank=0, local_rank=0, pid=7, exitcode=1, message="ValueError: no"
)


def place(number: int) -> WorldNode:
    return WorldNode(
        node=f"node-{number}",
        name=f"host-{number}",
        addr="10.0.0.1",
        peer=f"10.0.0.1:{number}",
        node_rank=number,
        nproc=2,
        role="even" if number % 2 == 0 else "odd",
        first_rank=2 * number,
        first_role_rank=2 * (number // 2),
        local_ranks=(0, 1),
    )


def world_of(count: int, leavers: int = 0, **fields) -> World:
    made = World(generation=3, phase="running", store="10.0.0.1:1", reason="why", **fields)
    return made.with_nodes(map(place, range(count)), [f"gone-{n}" for n in range(leavers)])


def sent(value):
    """As it comes out of a store."""
    return json.loads(json.dumps(value))


def test_totals_speak_of_all_nodes():
    world = world_of(5)
    assert (world.count, world.size, world.roles) == (5, 10, {"even": 6, "odd": 4})
    assert (world.role_size("odd"), world.role_size("nobody")) == (4, 0)
    assert world.candidates == {f"node-{n}": f"10.0.0.1:{n}" for n in range(5)}
    assert len(world_of(100).candidates) == FAILOVER_CANDIDATES_LIMIT


@pytest.mark.parametrize(
    ("node", "local_rank", "node_rank", "rank"),
    [("node-2", 1, 2, 5), ("node-2", 2, 2, None), ("stranger", 0, None, None)],
)
def test_places_are_found_by_node(node, local_rank, node_rank, rank):
    world = world_of(5)
    assert (world.place(node), world.rank(node, local_rank)) == (node_rank, rank)
    assert (world.find(node) is None) == (node_rank is None)


@a_few_examples
@given(st.integers(0, 300), st.integers(0, 20))
def test_a_summary_and_all_parts_are_the_world(count, leavers):
    world = world_of(count, leavers)
    parts = sent(world.parts())
    whole = World.from_parts(sent(world.summary()), parts.values())
    assert set(whole.handing_over) == set(world.handing_over)
    assert whole.nodes == world.nodes
    assert (whole.size, whole.count, whole.digest) == (world.size, world.count, world.digest)


@pytest.mark.parametrize("count", [1, PART_NODES, 500])
def test_a_nodes_own_part_has_its_place(count):
    world = world_of(count)
    parts = sent(world.parts())
    assert len(parts) == world.part_count == parts_for(count)
    for node in world.nodes:
        mine = World.from_parts(
            sent(world.summary()), [parts[part_key(node.node, world.part_count)]]
        )
        assert mine.find(node.node) == node
        assert (mine.size, mine.count, mine.roles) == (world.size, world.count, world.roles)


def test_a_store_may_take_fewer_parts():
    world = world_of(500).in_parts(5)
    parts = sent(world.parts())
    assert len(parts) == 5
    assert World.from_parts(sent(world.summary()), parts.values()) == world
    assert parts[part_key("node-77", 5)]["nodes"]


def test_no_key_of_a_part_is_the_beginning_of_another():
    keys = list(world_of(4096).parts())
    assert len({len(key) for key in keys}) == 1


def test_world_sent_to_a_node_does_not_grow_with_the_nodes():
    few, many = world_of(PART_NODES), world_of(4096)
    assert len(json.dumps(many.summary())) < 1.2 * len(json.dumps(few.summary()))
    of_few, of_many = (max(map(len, map(json.dumps, w.parts().values()))) for w in (few, many))
    assert of_many < 2.5 * of_few


def test_every_part_names_the_candidates_and_no_summary_does():
    world = world_of(100)
    assert "candidates" not in world.summary()
    for part in sent(world.parts()).values():
        mine = World.from_parts(sent(world.summary()), [part])
        over = World.from_json({**sent(world.summary()), "phase": "over"})
        assert mine.candidates == over.with_list_of(mine).candidates == world.candidates


def test_parts_have_the_addresses_of_all_nodes():
    world = world_of(100)
    found = addresses_in(sent(world.parts()).values())
    assert found == {node.node: node.peer for node in world.nodes}


@pytest.mark.parametrize("record", [Member, World])
def test_a_record_that_lacks_what_it_must_say_is_refused(record):
    with pytest.raises(TypeError, match=f"A {record.__name__} lacks"):
        record.from_json({"name": "host"})


def test_parts_of_other_worlds_are_passed_over():
    old, new = world_of(200), world_of(20)
    left_behind = {**sent(old.parts()), **sent(new.parts())}
    assert World.from_parts(sent(new.summary()), left_behind.values()).nodes == new.nodes
    later = World(generation=4, phase="running").with_nodes(new.nodes)
    assert not later.owns(sent(new.parts()).popitem()[1])


def test_another_phase_has_the_same_list_and_another_list_another_digest():
    world = world_of(4)
    over = World.from_json({**sent(world.summary()), "phase": "over"})
    assert over.has_list_of(world)
    assert over.with_list_of(world).nodes == world.nodes
    assert not world_of(5).has_list_of(world)
    assert not world_of(4, leavers=1).has_list_of(world)


def test_record_with_unknown_fields_is_read():
    world = world_of(2)
    summary = {**sent(world.summary()), "mood": "good"}
    parts = [
        {**part, "nodes": [[*node, "in a bad mood"] for node in part["nodes"]]}
        for part in sent(world.parts()).values()
    ]
    assert World.from_parts(summary, parts).nodes == world.nodes


@pytest.mark.parametrize(
    "said", [{}, {"failures": (FAILURE,), "standing": (0, 1), "gone": 3, "leaving": "SIGTERM"}]
)
def test_a_member_says_what_is_not_at_its_default(said):
    member = Member(node="n", name="h", addr="10.0.0.1", nproc=2, **said)
    assert set(member.to_json()) == {"node", "name", "addr", "nproc", *said}
    assert Member.from_json(sent(member.to_json())) == member
