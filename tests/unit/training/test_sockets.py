"""The group's connections are told from all others, also while others come and go."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

import pytest

from torchelastic.training import sockets
from torchelastic.training.sockets import Ports, listening_address


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
def test_what_is_no_card_is_refused(text):
    with pytest.raises(ValueError, match="not an address as gloo writes it"):
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
