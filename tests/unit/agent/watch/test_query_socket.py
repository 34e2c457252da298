"""What a user of this machine may ask an agent: real sockets."""

import asyncio
import contextlib
import os
import socket
import stat
import threading

import pytest

from tests.unit.agent.support import in_loop
from torchelastic.agent.watch import inspector
from torchelastic.agent.watch.inspector import SOCKET_FILE, QuerySocket, WorldActivity, ask
from torchelastic.events.analysis.hangs import RankActivity

FOUND = WorldActivity(2, (RankActivity(rank=0, node="a", stack="x"),), ("b",))


class Inspector:
    async def everywhere(self):
        return FOUND


@contextlib.contextmanager
def answering(directory):
    """An agent's end, in a thread."""
    ready, over = threading.Event(), threading.Event()

    async def main():
        made = QuerySocket(directory, Inspector())
        await made.open()
        ready.set()
        await asyncio.to_thread(over.wait)
        await made.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def deep(tmp_path):
    """A path that is longer than the address of a socket may be."""
    made = tmp_path / ("d" * 100) / ("e" * 100)
    made.mkdir(parents=True)
    return made


def test_query_socket_answers_repeated_queries(deep):
    with answering(deep):
        assert ask(deep) == FOUND
        assert ask(deep) == FOUND
        assert stat.S_IMODE((deep / SOCKET_FILE).stat().st_mode) == 0o600
    assert not (deep / SOCKET_FILE).exists()


def test_query_socket_replaces_leftover_of_killed_agent(deep):
    with socket.socket(socket.AF_UNIX) as left, inspector._short(deep / SOCKET_FILE) as address:
        left.bind(address)
    with pytest.raises(ConnectionRefusedError):
        ask(deep)
    with answering(deep):
        assert ask(deep) == FOUND


def test_query_socket_rejects_other_users(deep, monkeypatch):
    one, other = socket.socketpair()
    with one, other:
        assert inspector._is_ours(one)
    monkeypatch.setattr(inspector, "_is_ours", lambda end: False)
    with answering(deep), pytest.raises(OSError, match=r"."):
        ask(deep)


def test_anything_else_is_not_answered(deep):
    for said in (b"", b"anything\n", b"x" * 100_000):
        with (
            answering(deep),
            socket.socket(socket.AF_UNIX) as end,
            inspector._short(deep / SOCKET_FILE) as address,
        ):
            end.settimeout(30)
            end.connect(address)
            with contextlib.suppress(OSError):  # it has gone before it has heard all
                end.sendall(said)
                end.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(100) == b"", said[:10]
            assert ask(deep) == FOUND


@in_loop
async def test_a_directory_that_cannot_be_used_costs_the_answers_only(deep, caplog):
    (deep / SOCKET_FILE).mkdir()
    (deep / SOCKET_FILE / "x").touch()
    made = QuerySocket(deep, Inspector())
    await made.open()
    await made.close()
    assert "`torchelastic stacks` cannot reach this agent" in caplog.text
    assert os.listdir(deep / SOCKET_FILE) == ["x"]
