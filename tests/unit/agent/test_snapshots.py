"""Which nodes hold this one's pieces, as far as it knows the world."""

import dataclasses

import pytest

from torchelastic.agent.snapshots import chosen_holders
from torchelastic.rendezvous.restart_policy import RestartLedger
from torchelastic.rendezvous.world import World, WorldNode


def node(name, rank, peer=None):
    at = f"{name}:1" if peer is None else peer
    return WorldNode(name, name, name, rank, 1, "default", rank, rank, (0,), at)


def world(*names, **peers):
    empty = World(generation=3, phase="running", ledger=RestartLedger(), size=0)
    return empty.with_nodes(node(name, at, peers.get(name)) for at, name in enumerate(names))


def part(whole, *names):
    """The world as an agent has it that knows these nodes only."""
    known = tuple(item for item in whole.nodes if item.node in names)
    return dataclasses.replace(whole, nodes=known)


@pytest.mark.parametrize(
    ("seen", "replicas", "chosen"),
    [
        (world("a", "b", "c"), 1, ["c"]),
        (world("a", "b", "c"), 2, ["c", "a"]),
        (world("a", "b", "c"), 9, ["c", "a"]),
        (world("a", "b", "c"), 0, []),
        (world("b"), 1, []),
        (world("a", "c"), 1, []),  # it has no place itself
        (world("a", "b", "c", c=""), 1, ["a"]),  # nobody reaches the other
        (part(world("a", "b", "c", "d"), "a", "b"), 1, ["a"]),
        (part(world("a", "b", "c", "d"), "b"), 1, ["a"]),  # alone in its part
    ],
)
def test_who_holds_the_pieces_of_b(seen, replicas, chosen):
    assert chosen_holders(seen, "b", replicas) == [(name, f"{name}:1") for name in chosen]
