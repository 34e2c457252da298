"""A process that has no channel loses nothing by sending, and never writes on somebody else's."""

import os
import socket

import pytest

from torchelastic.transport.auth import Secret
from torchelastic.worker import channel, handed_secret, orders


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(channel, "_opened", None)


def test_without_a_channel_nothing_happens(monkeypatch, tmp_path):
    """Another file with the number is left alone."""
    with (tmp_path / "data").open("w+b") as file:
        for value in ("", "x", "-1", "9999", str(file.fileno())):
            monkeypatch.setattr(channel, "_opened", None)
            monkeypatch.setenv(channel.VARIABLE, value)
            channel.send({"type": "progress"})
        assert (tmp_path / "data").stat().st_size == 0


def test_a_foreign_socket_is_left_alone(monkeypatch):
    """The environment is inherited by children, the descriptor is not: its number is used again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        monkeypatch.setenv(channel.VARIABLE, str(theirs.fileno()))
        channel.send({"type": "progress"})  # made by this process, not by its parent
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(100)
        theirs.send(b"still open")


@pytest.fixture
def peer(monkeypatch):
    """The agent's end of a channel that counts as ours."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(channel, "_peer", lambda _: os.getppid())
    monkeypatch.setenv(channel.VARIABLE, str(theirs.fileno()))
    ours.setblocking(False)
    with ours, theirs:
        yield ours
        opened = channel._channel()
        opened.close()


def test_messages_are_json_lines_and_a_full_channel_drops_them_and_does_not_wait(peer):
    for step in range(5000):
        channel.send({"type": "progress", "step": step})
    assert peer.recv(100) == b'{"type": "progress", "step": 0}\n'
    with pytest.raises(ValueError, match="the limit is"):
        channel.send({"text": "x" * channel.LIMIT})


def test_an_agent_that_is_gone_is_no_error(peer):
    channel.send({})
    peer.close()
    channel.send({}, timeout=5.0)


def test_programs_that_the_worker_starts_do_not_get_it(monkeypatch):
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    monkeypatch.setenv(channel.VARIABLE, str(writer))
    channel.adopt()
    assert not os.get_inheritable(writer)
    os.close(reader)
    os.close(writer)


def test_send_to_full_channel_does_not_block():
    """`socket.send_fds` would, in Python 3.11: an agent would hang with its worker."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fill():
        while True:
            channel.transmit(ours, b"x" * 4096, [ours.fileno()])

    with ours, theirs, pytest.raises(BlockingIOError):
        fill()  # the kernel closes what nobody has received


def test_descriptors_are_received_for_this_process_alone():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        with pytest.raises(BlockingIOError):
            channel.receive(theirs, socket.MSG_DONTWAIT)
        channel.transmit(ours, b"take it", [ours.fileno()])
        data, (descriptor,), _ = channel.receive(theirs)
        assert data == b"take it"
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
        channel.transmit(ours, b"alone")
        assert channel.receive(theirs)[:2] == (b"alone", [])


# --- orders and reports ---------------------------------------------------------------------------


def test_other_messages_are_none_of_ours_and_a_wrong_field_is_refused():
    assert orders.from_json({"type": "progress", "step": 3}) is None
    for data in (
        {"type": "enter", "generation": 1},
        {"type": "stopped", "generation": 1, "step": None},
        {"type": "up", "generation": 1, "step": 2, "built": "long"},
        {"type": "pong", "waiting": 1},
    ):
        with pytest.raises(ValueError, match=f"of a message '{data['type']}' "):
            orders.from_json(data)


# ---  --------------------------------------------------------------------------------------------


KEY = b"0123456789abcdef" * 256


@pytest.fixture(autouse=True)
def nothing_handed(monkeypatch):
    monkeypatch.setattr(handed_secret, "_key", None)
    monkeypatch.delenv(handed_secret.VARIABLE, raising=False)


def test_a_worker_takes_it_once_and_leaves_no_trace(monkeypatch):
    descriptor = handed_secret.offer(Secret(KEY))
    monkeypatch.setenv(handed_secret.VARIABLE, str(descriptor))
    handed_secret.adopt()
    assert handed_secret.VARIABLE not in os.environ
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    for _ in range(2):
        secret = handed_secret.secret()
        assert secret is not None
        assert secret.reveal() == KEY


@pytest.mark.parametrize("text", [None, "", "x"])
def test_a_worker_of_a_job_without_a_secret_has_none(monkeypatch, text):
    if text is not None:
        monkeypatch.setenv(handed_secret.VARIABLE, text)
    handed_secret.adopt()
    assert handed_secret.secret() is None
