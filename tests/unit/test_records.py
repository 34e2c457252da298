"""`replace` of records with many fields."""

from __future__ import annotations

import dataclasses

import pytest

from torchelastic.records import replace
from torchelastic.rendezvous.world import Member, World, WorldNode


def test_a_record_is_changed_as_dataclasses_change_it():
    member = Member(node="a", name="a", addr="a", nproc=2)
    assert replace(member, gone=3) == dataclasses.replace(member, gone=3)
    assert member.gone == -1
    assert hash(replace(member)) == hash(member)


def test_cached_properties_are_computed_again():
    nodes = [WorldNode(name, name, name, 0, 1, "", 0, 0, (0,)) for name in "ab"]
    world = World(generation=0, phase="running").with_nodes(nodes)
    assert world.members == {"a", "b"}
    assert replace(world, nodes=tuple(nodes[:1])).members == {"a"}


@pytest.mark.parametrize("counted", [False, True], ids=["plain", "with a cached property"])
def test_an_unknown_field_is_rejected(counted):
    world = World(generation=0, phase="running")
    if counted:
        assert world.members == frozenset()
    with pytest.raises(TypeError, match="No such fields: phrase"):
        replace(world, phrase="over")
