"""What tests of the loop run in."""

import os
import socket
import threading

import pytest

from tests.unit.training.fake_agent import Coordinator, FakeAgent, store
from tests.unit.training.loop_support import Counting
from torchelastic import train_loop
from torchelastic.worker.orders import Enlisted


@pytest.fixture
def run(monkeypatch):
    """Run `train` against an agent that follows a script in a thread."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def run(script, train_step, state=None, coordinator=Coordinator, how=train_loop.train, **more):
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
