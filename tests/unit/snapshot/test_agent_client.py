"""A worker's questions to its agent about snapshots, over a socket like the one between them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest

from tests.support import poll_for
from torchelastic.errors import SnapshotError
from torchelastic.snapshot import agent_client
from torchelastic.snapshot.agent_client import AgentClient
from torchelastic.snapshot.layout import SHARED, Sizes, create
from torchelastic.snapshot.messages import (
    Dropped,
    Granted,
    InventoryItem,
    NodeInventory,
    Opened,
    Refused,
    to_json,
)
from torchelastic.worker import orders, status_page
from torchelastic.worker.channel import WorkerLink

HELD = InventoryItem(SHARED, (2, 7), 100, 0, 4)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = WorkerLink(ours)
    yield AgentClient(link), theirs
    theirs.close()
    link.close()


def answer(theirs, *answers):
    """Answer one request with all of these, in a thread; a descriptor follows its message."""

    def run():
        request = json.loads(theirs.recv(1 << 16))
        for make, fds in answers:
            text = json.dumps(to_json(make(request["request"]))).encode() + b"\n"
            socket.send_fds(theirs, [text], fds)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("kind", "writable"), [(Granted, True), (Opened, False)])
def test_a_memory_comes_with_the_answer(ends, kind, writable):
    agent, theirs = ends
    descriptor = create(Sizes(64, 64))
    thread = answer(theirs, (kind, [descriptor]))
    memory = (
        agent.request_memory(SHARED, 64, 64) if writable else agent.open(SHARED, (2, 7), "host:1")
    )
    assert memory.freshest() is None
    if writable:
        memory.begin((0, 1))[:1] = b"x"
        memory.seal((0, 1), b"", 1, 0)
    memory.close()
    thread.join()
    os.close(descriptor)


def test_an_answer_to_what_nobody_waits_for_is_dropped(ends):
    """And its memory is closed."""
    agent, theirs = ends
    descriptor = create(Sizes(64, 64))
    before = len(os.listdir("/proc/self/fd"))
    late = (lambda number: Granted(number + 7), [descriptor])
    thread = answer(theirs, late, (lambda number: Refused(number, "No room."), []))
    with pytest.raises(SnapshotError, match=r"^No room\.$"):
        agent.request_memory(SHARED, 64, 64)
    thread.join()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_drop_returns_when_the_agent_has_dropped_the_version(ends):
    agent, theirs = ends
    thread = answer(theirs, (Dropped, []))
    agent.drop(SHARED, (2, 7))
    thread.join()
    thread = answer(theirs, (lambda number: Refused(number, "No."), []))
    with pytest.raises(SnapshotError, match=r"^No\.$"):
        agent.drop(SHARED, (2, 7))
    thread.join()


def test_patience_ends_later_the_more_is_asked_for(ends, monkeypatch):
    agent, _ = ends
    monkeypatch.setattr(agent_client, "ANSWER_TIMEOUT", 0.0)
    monkeypatch.setattr(agent_client, "LEAST_ALLOCATION_RATE", 1e4)
    with pytest.raises(SnapshotError, match="Timed out waiting for the agent"):
        agent.inventory()
    began = time.monotonic()
    with pytest.raises(agent_client.Unanswered):
        agent.request_memory(SHARED, 1000, 64)
    assert time.monotonic() - began >= 0.1


@pytest.fixture
def listening(ends):
    """An agent that is listened to, and what was heard."""
    agent, theirs = ends
    heard = []
    agent.listen(heard.append)
    assert orders.from_json(json.loads(theirs.recv(1 << 16))) == orders.CanSave()
    yield agent, theirs, heard
    agent._link.wake()
    for thread in threading.enumerate():
        if thread.name == "torchelastic-agent":
            thread.join()


def tell(theirs, message, *fds):
    socket.send_fds(theirs, [json.dumps(message).encode() + b"\n"], fds)


def test_the_word_to_leave_is_heard_whenever_it_comes(listening):
    agent, theirs, heard = listening
    leave = orders.Leave(15, 1.5)
    tell(theirs, orders.to_json(leave))
    poll_for(lambda: heard == [leave], what="it is heard by the thread that listens")
    descriptor = create(Sizes(64, 64))
    before = len(os.listdir("/proc/self/fd"))
    tell(theirs, to_json(Granted(99)), descriptor)  # late: closed, and nothing else
    thread = answer(theirs, (lambda number: NodeInventory(number, (HELD,)), []))
    assert agent.inventory() == NodeInventory(1, (HELD,))
    thread.join()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_the_word_to_leave_may_come_before_an_answer(listening):
    agent, theirs, heard = listening
    leave = orders.Leave(15, 1.5, saves=True)

    def run():
        number = 0
        while not number:  # the status page is asked for, too
            number = json.loads(theirs.recv(1 << 16)).get("request", 0)
        tell(theirs, orders.to_json(leave))
        tell(theirs, to_json(Refused(number, "No room.")))

    thread = threading.Thread(target=run)
    thread.start()
    with pytest.raises(SnapshotError, match=r"^No room\.$"):
        agent.request_memory(SHARED, 64, 64)
    thread.join()
    assert heard == [leave]


def test_an_agent_that_is_gone_is_no_surprise(ends):
    agent, theirs = ends
    theirs.close()
    with pytest.raises(SnapshotError):
        agent.inventory()


def test_a_process_without_an_agent_has_none(monkeypatch):
    monkeypatch.setattr(agent_client.channel, "link", lambda: None)
    assert agent_client.connect() is None
    assert agent_client.connect() is None


def test_one_state_of_a_process_is_kept(ends, monkeypatch):
    monkeypatch.setattr(agent_client, "_connected", False)
    monkeypatch.setattr(agent_client.channel, "link", lambda: ends[0]._link)
    assert agent_client.connect() is not None
    with pytest.raises(RuntimeError, match="optimizers into one TorchState"):
        agent_client.connect()


def test_a_status_page_that_comes_before_an_answer_shows_the_steps(ends):
    agent, theirs = ends
    agent.progress((1, 4), rank=2)  # nowhere to show it yet
    descriptor = status_page.create()
    socket.send_fds(
        theirs, [json.dumps(orders.to_json(orders.StatusPage())).encode()], [descriptor]
    )
    thread = answer(theirs, (lambda number: NodeInventory(number, (HELD,), "host:1", "n0"), []))
    assert agent.inventory() == NodeInventory(1, (HELD,), "host:1", "n0")
    thread.join()
    agent.progress((1, 5), rank=2)
    shown = status_page.read(descriptor)
    assert (shown.generation, shown.step, shown.rank) == (1, 5, 2)
    agent._status_page.close()
    os.close(descriptor)
