"""What a world of replicas continues from if its workers lack a part: memory, or a checkpoint."""

import logging
import threading
import time

import pytest
import torch

from torchelastic.snapshot.layout import own, shard
from torchelastic.snapshot.messages import InventoryItem
from torchelastic.snapshot.search import Node, StoredCheckpoint, choices, whole_versions
from torchelastic.snapshot.writer import ShardStatus
from torchelastic.training import recovery
from torchelastic.training.sharded.part_snapshots import PartSnapshots, PartTree
from torchelastic.training.state import FIRST, TORN

#: Generation 4, and the generation after it.
OLD, NEW, NEXT = (4, 10), (4, 12), (5, 11)


def node(*held, peer="10.0.0.1:1", first=0):
    """A node with these versions of parts: (part, version)."""
    items = (InventoryItem(shard(part), version, 8, part, 2) for part, version in held)
    return Node(peer, tuple(items), first)


def both(*versions):
    return [(part, version) for part in (0, 1) for version in versions]


@pytest.mark.parametrize(
    ("nodes", "stored", "tried"),
    [
        pytest.param([node()], None, ["checkpoint"], id="nothing in memory"),
        pytest.param([node(*both(OLD, NEW))], None, [NEW, OLD, "checkpoint"], id="one node"),
        pytest.param([node(*both(OLD), (0, NEW))], None, [OLD, "checkpoint"], id="one part sealed"),
        pytest.param(
            [node((0, OLD), (0, NEW)), node((1, OLD), first=1)],
            None,
            [OLD, "checkpoint"],
            id="each node has a part, one of them no newer",
        ),
        pytest.param(
            [node((0, NEW), (1, NEW)), node(first=1)], None, [NEW, "checkpoint"], id="a copy"
        ),
        pytest.param(
            [node((0, NEW)), node((1, NEW), first=1, peer="")],
            None,
            ["checkpoint"],
            id="no other node reaches a part",
        ),
        pytest.param([node(*both(NEXT, NEW))], None, [NEXT, NEW, "checkpoint"], id="generations"),
        pytest.param([node(*both(NEW))], 12, [NEW, "checkpoint"], id="a checkpoint as old"),
        pytest.param(
            [node(*both(NEW))], 13, ["beyond 12", NEW, "checkpoint"], id="a newer checkpoint"
        ),
        pytest.param(
            [node(*both(NEW, OLD))],
            11,
            [NEW, "beyond 10", OLD, "checkpoint"],
            id="a checkpoint between two versions",
        ),
    ],
)
def test_memory_or_the_checkpoint_whichever_is_newer(nodes, stored, tried):
    named = {f"node{number}": one for number, one in enumerate(nodes)}
    names = [
        one
        if not isinstance(one, StoredCheckpoint)
        else ("checkpoint" if one.beyond < 0 else f"beyond {one.beyond}")
        for one in choices(whole_versions(named, 2), stored)
    ]
    assert names == tried


def test_pieces_of_a_script_are_no_parts():
    item = InventoryItem(own(0), NEW, 8, 0, 1)
    assert whole_versions({"a": Node("", (item,), 0)}, 1) == []


@pytest.mark.parametrize(
    ("base", "lost", "said"),
    [
        (NEW, "part 1 is gone", "from step 12, from snapshots in memory: part 1 is gone."),
        (NEW, "", "from step 12, from snapshots in memory: no worker has the state any more."),
        ((-1, 8), "part 1 is gone", "from the checkpoint of step 8: part 1 is gone."),
        (FIRST, "part 1 is gone", "from step 0, because there is no snapshot and no checkpoint: "),
        ((-1, 8), "", None),
        (FIRST, "", None),
        (TORN, "part 1 is gone", None),
    ],
)
def test_the_log_says_where_the_state_comes_from(base, lost, said, caplog):
    with caplog.at_level(logging.WARNING):
        recovery.explain(base, lost)
    assert (said is None and not caplog.text) or said in caplog.text


def test_a_part_is_read_as_it_was_written():
    model = torch.nn.Linear(300, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    loaded = []
    rest = {"values": {"epoch": 3}}
    tree = PartTree(
        [model], [optimizer], lambda: rest, lambda _: None, [("a", "b")], load=loaded.append
    )
    flat = tree.flatten(tree.flatten_lasting())
    assert {id(one) for one in flat.watched} >= {id(model.weight)}
    assert tree.flatten_lasting().tensors is flat.lasting  # flattened once
    weight = model.weight.detach().clone()
    tree.put([tree._lasting(), tree._passing()])
    (part,) = loaded
    assert part["values"] == {"epoch": 3}
    assert torch.equal(part["model"][0]["parameters"]["weight"], weight)
    assert part["optimizer"][0]["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


class OneReplica:
    """A world of one worker, which keeps its part; `allowed` lets snapshots be sealed."""

    def __init__(self, agent):
        self.rank, self.size, self.generation, self.freshest = 0, 1, 4, FIRST
        self.agent, self.next = agent, 0
        self.allowed = threading.Event()
        model = torch.nn.Linear(300, 300)
        tree = PartTree([model], [], lambda: {}, lambda _: None, [], load=lambda _: None)
        self.snapshots = PartSnapshots(tree, lambda: None, lambda: None, self.allowed.wait)
        self.snapshots.begin(self, 1)

    def next_size(self):
        return self.next

    def commit_until_begun(self):
        """Commit steps until there is memory; return the version that is being written."""
        for step in range(1, 10_000):
            self.snapshots.decide(self.snapshots.vote())
            self.snapshots.committed((4, step))
            if self.snapshots._writer._sealing:
                return (4, step)
            time.sleep(0.001)
        raise AssertionError("no memory")


@pytest.fixture
def one_replica(snapshot_agent):
    made = OneReplica(snapshot_agent)
    yield made
    made.allowed.set()
    made.snapshots.end()
    made.snapshots.wait_until_sealed()


def test_no_snapshot_is_begun_once_another_replica_is_about_to_join(one_replica):
    assert one_replica.snapshots.vote() == ShardStatus.DONE
    one_replica.next = 2
    assert one_replica.snapshots.vote() == ShardStatus.PENDING
    one_replica.next = 1
    assert one_replica.snapshots.vote() == ShardStatus.DONE


def test_the_next_world_waits_for_a_snapshot_only_if_it_needs_one(one_replica):
    version = one_replica.commit_until_begun()
    one_replica.snapshots.end()  # does not wait: it may not be sealed yet
    assert one_replica.agent.versions(shard(0)) == []
    one_replica.allowed.set()
    one_replica.snapshots.wait_until_sealed()
    assert one_replica.agent.versions(shard(0)) == [version]
