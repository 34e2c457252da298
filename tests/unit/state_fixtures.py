"""Fixtures of tests of the loop, of snapshots and of status pages."""

import os
import socket
import threading

import pytest
import torch

from tests.unit.snapshot.cast import FakeSnapshotAgent
from tests.unit.training.fake_agent import Coordinator, Counting, FakeAgent, store
from torchelastic.checkpoint import CheckpointStore, finish, set_checkpoint_manager
from torchelastic.snapshot import agent_client
from torchelastic.training import train
from torchelastic.worker import status_page as status_pages
from torchelastic.worker.orders import Enlisted


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny, and torch's idle threads spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(monkeypatch):
    """Run `train` against an agent that follows a script in a thread."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def run(script, train_step, state=None, coordinator=Coordinator, how=train.train, **more):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with store() as port, ours:
            agent = FakeAgent(ours, port)
            failures = []

            def follow():
                try:
                    agent.hear(Enlisted)
                    script(agent)
                except BaseException as error:
                    failures.append(error)
                    ours.shutdown(socket.SHUT_RDWR)

            thread = threading.Thread(target=follow)
            thread.start()
            try:
                return how(coordinator(theirs), train_step, state or Counting(), **more)
            finally:
                thread.join()
                if failures:
                    raise failures[0]

    return run


@pytest.fixture
def snapshot_agent(monkeypatch):
    """The memory of the agent that every state of the test connects to."""
    made = FakeSnapshotAgent()
    monkeypatch.setattr(agent_client, "connect", lambda: made)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    yield made
    made.close()


@pytest.fixture
def status_page():
    descriptor = status_pages.create()
    made = status_pages.StatusPage(descriptor)
    yield made
    made.close()
    os.close(descriptor)


@pytest.fixture
def make_store(tmp_path):
    """Make the checkpoint store that all states of the test use."""
    made = []

    def make(**options):
        made.append(CheckpointStore(tmp_path / "checkpoints", writer="thread", **options))
        set_checkpoint_manager(made[-1])
        return made[-1]

    yield make
    finish()
    set_checkpoint_manager(None)
    for one in made:
        one.close()
