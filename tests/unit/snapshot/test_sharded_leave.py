"""Who fetches which shards before nodes leave, and when a worker gives up."""

from __future__ import annotations

import signal
import time

import pytest

from tests.unit.training.keep_support import FakeSnapshotAgent
from torchelastic.snapshot import sharded_leave
from torchelastic.snapshot.layout import shard
from torchelastic.snapshot.sharded_leave import Handover, RankReport, ShardedLeave, handovers
from torchelastic.worker.orders import Leave


def reports(*nodes, peers=True):
    """Each node with two ranks, such as "012 leaves": the pieces that it holds."""
    found = []
    for number, words in enumerate(nodes):
        held, _, leaves = words.partition(" ")
        pieces = [shard(int(rank)) for rank in held]
        peer = f"p{number}" if peers else ""
        # The order reaches the ranks of a node one after the other.
        found += [RankReport(f"n{number}", bool(leaves), peer, pieces)]
        found += [RankReport(f"n{number}", False, peer, pieces)]
    return found


TABLE = [
    ("copies are on the next node", ("0145 leaves", "0123", "2345"), [], ""),
    ("no copies", ("01 leaves", "23", "45"), [(0, 2, 0), (1, 4, 0)], ""),
    ("copies leave, too", ("01 leaves", "0123 leaves", "2345"), [(0, 4, 0), (1, 4, 0)], ""),
    ("all leave", ("0123 leaves", "0123 leaves"), [], "0123"),
    ("a piece was not written", ("0 leaves", "23"), [(0, 2, 0)], "1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "fetched", "lost"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_who_fetches_what(nodes, fetched, lost):
    found = handovers(reports(*nodes))
    expected = [Handover(shard(piece), rank, f"p{node}") for piece, rank, node in fetched]
    assert found == (expected, [shard(int(piece)) for piece in lost])


def test_nobody_fetches_from_who_has_no_address():
    assert handovers(reports("01 leaves", "23", peers=False)) == ([], [shard(0), shard(1)])


def test_without_a_commit_it_gives_up_after_half_of_the_time(monkeypatch):
    sent = []
    monkeypatch.setattr(sharded_leave.os, "kill", lambda pid, signum: sent.append(signum))
    agent = FakeSnapshotAgent()
    leave = ShardedLeave(agent, 0)
    leave.listen()
    leave.listen()
    (told,) = agent.on_leave
    assert not leave.is_ordered
    assert leave.grace is None
    told(Leave(signal.SIGTERM, time.monotonic() + 0.02))
    assert leave.is_ordered
    assert leave._released.wait(10)
    assert sent == [signal.SIGTERM]
    agent.close()
