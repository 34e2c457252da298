import pytest

from tests.unit.snapshot.cast import FakeSnapshotAgent, Ranks
from tests.unit.state_fixtures import make_store, one_thread, run, snapshot_agent, status_page
from torchelastic.snapshot import leave, pieces

__all__ = ["make_store", "one_thread", "run", "snapshot_agent", "status_page"]


@pytest.fixture
def signals(monkeypatch):
    """The signals that a leaving worker sends to itself in the end."""
    sent = []
    monkeypatch.setattr(leave.os, "kill", lambda pid, signum: sent.append(signum))
    return sent


@pytest.fixture
def nodes(monkeypatch):
    """The memories of two nodes that reach each other."""
    monkeypatch.setattr(pieces, "FETCH_PAUSE", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    peers = {}
    made = [FakeSnapshotAgent(name, peers) for name in ("a", "b")]
    peers.update({one.name: one for one in made})
    yield made
    for one in made:
        one.close()


@pytest.fixture
def apart(nodes, monkeypatch):
    """Ranks, one on each node, that do not train together, so that their parameters differ."""
    return Ranks(monkeypatch, nodes)
