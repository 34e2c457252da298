"""The group's connections are told from all others, also while others come and go."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

import pytest

from torchelastic.training.group import sockets
from torchelastic.training.group.sockets import Ports, listening_address


def card(family: int, host: str, port: int, name: bytes = b"node") -> bytes:
    """As gloo writes it."""
    packed = socket.inet_pton(family, host)
    before = b"" if family == socket.AF_INET else bytes(4)
    address = struct.pack("=H", family) + struct.pack(">H", port) + before + packed
    length = struct.pack("=Q", len(name))
    return length + name + struct.pack("=Q", 136) + address.ljust(136, b"\0") + bytes(30)


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "10.1.2.3"), (socket.AF_INET6, "fe80::1:2")]
)
def test_a_card_tells_where_a_rank_listens(family, host):
    assert listening_address(card(family, host, 40001)) == (host, 40001)


@pytest.mark.parametrize("text", [b"", b"short", bytes(200), b"\xff" * 200])
def test_invalid_gloo_card_is_refused(text):
    with pytest.raises(ValueError, match="not a gloo address"):
        listening_address(text)


class Mesh:
    """Two ranks' listeners in one process, a connection between them, and one of a stranger's."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.own, self.other, self.foreign = (
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)
        )
        self.outgoing, self.far = self.connect(stack, self.other)
        self.stranger, self.stranger_far = self.connect(stack, self.foreign)
        cards = [
            card(socket.AF_INET, *listener.getsockname()) for listener in (self.own, self.other)
        ]
        self.ports = Ports.told(0, [cards])

    @staticmethod
    def connect(stack, listener):
        near = stack.enter_context(socket.create_connection(listener.getsockname()))
        return near, stack.enter_context(listener.accept()[0])


@pytest.fixture
def mesh():
    with contextlib.ExitStack() as stack:
        yield Mesh(stack)


def inode(end: socket.socket) -> int:
    return os.fstat(end.fileno()).st_ino


def talks(near: socket.socket, far: socket.socket) -> bool:
    near.sendall(b"word")
    return far.recv(4) == b"word"


def test_connections_are_found_by_the_ports_of_the_group(mesh):
    with contextlib.ExitStack() as stack:
        incoming_far, incoming = mesh.connect(stack, mesh.own)
        # The far ends belong to the other rank; it happens to be in this process, too.
        assert sockets.find(mesh.ports) == {inode(mesh.outgoing), inode(incoming)}
        assert inode(incoming_far) not in sockets.find(mesh.ports)


def test_only_what_was_found_is_shut_down(mesh):
    sockets.shut_down(sockets.find(mesh.ports))
    assert mesh.far.recv(1) == b""
    assert talks(mesh.stranger, mesh.stranger_far)
    with contextlib.ExitStack() as stack:
        assert talks(*mesh.connect(stack, mesh.own))  # the listeners listen


def test_a_number_used_again_is_not_taken_for_the_old_socket(mesh):
    found = sockets.find(mesh.ports)
    os.dup2(mesh.stranger.fileno(), mesh.outgoing.fileno())
    assert not sockets.are_open(found)
    sockets.shut_down(found)
    assert talks(mesh.stranger, mesh.stranger_far)


def test_a_silenced_connection_has_nothing_to_say(mesh):
    mesh.outgoing.setblocking(False)
    found = sockets.find(mesh.ports)
    sockets.shut_down(found)
    assert mesh.outgoing.recv(1) == b""
    listeners = sockets.silence(found)
    with pytest.raises(BlockingIOError):
        mesh.outgoing.recv(1)
    assert mesh.outgoing.send(b"whatever gloo still wants to write") > 0
    for listener in listeners:
        listener.close()


def test_a_busy_second_thread_is_never_disturbed(mesh):
    found = sockets.find(mesh.ports)
    stop, heard = threading.Event(), []

    def come_and_go():
        while not stop.is_set():
            with contextlib.ExitStack() as stack:
                heard.append(talks(*mesh.connect(stack, mesh.foreign)))

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            assert sockets.find(mesh.ports) <= found
            sockets.shut_down(found)
    finally:
        stop.set()
        thread.join()
    assert heard
    assert all(heard)
    assert talks(mesh.stranger, mesh.stranger_far)


# --- connections to which nothing comes back -----------------------------------------------------


@pytest.mark.parametrize(
    ("again", "asked", "wait", "heard", "dead"),
    [
        (4, 0, 3.2, 3.1, True),  # sent at 0, 0.2, 0.6, 1.4 and 3.0 s
        (3, 0, 1.6, 3.1, False),  # idle before: it was sent 1.4 s ago at the earliest
        (4, 0, 3.2, 2.9, False),  # something was heard since
        (3, 0, 3.2, 9.0, False),  # a slower link: it was sent 2.8 s ago
        (2, 0, 6.4, 9.0, False),  # a slow link: two packets may be lost
        (3, 0, 6.4, 9.0, True),
        (0, 0, 0.2, 60.0, False),  # nothing to send, or a frozen peer: its kernel acknowledges
        (0, 1, 0.2, 60.0, False),  # the peer does not read, and its kernel says so now and then
        (0, 2, 0.2, 9.0, True),  # nor does that any more
        (0, 2, 0.2, 2.0, False),
    ],
)
def test_a_connection_is_dead_when_nothing_sent_was_answered_for_so_long(
    again, asked, wait, heard, dead
):
    told = struct.pack("=4B4xI44xI", 1, 0, again, asked, int(wait * 1e6), int(heard * 1e3))
    assert sockets.is_unanswered(told, 3.0) is dead


def test_the_other_end_of_a_dead_connection_is_named(mesh, monkeypatch):
    found = sockets.find(mesh.ports)
    talks(mesh.outgoing, mesh.far)
    assert sockets.unanswered(found, 0.0) is None
    monkeypatch.setattr(sockets, "is_unanswered", lambda told, seconds: seconds == 3.0)
    assert sockets.unanswered(found, 3.0) == mesh.other.getsockname()
    assert sockets.unanswered(frozenset(), 3.0) is None


@pytest.mark.parametrize(
    ("address", "ranks"),
    [
        (("10.0.0.2", 41), [2]),
        (("10.0.0.2", 59000), [2, 3]),  # accepted at our port: only the host is known
        (("10.0.0.9", 41), []),
    ],
)
def test_a_dead_connection_tells_of_ranks(address, ranks):
    hosts = [("10.0.0.1", 40), ("10.0.0.1", 41), ("10.0.0.2", 41), ("10.0.0.2", 42)]
    ports = Ports.told(0, [[card(socket.AF_INET, *host) for host in hosts]])
    assert ports.ranks_at(address) == ranks
