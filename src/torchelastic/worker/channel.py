"""The worker's end of its channel to the agent: one JSON line a message, over a unix socket.

`send` is for messages that may get lost. `WorkerLink` is for an in-process worker, which relies on
the channel: it receives the agent's orders, and its messages arrive.

A process that is not a worker has no channel, and its messages are dropped; so are those of a
worker's children, which inherit the environment but must not send for the worker.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from torchelastic import env
from torchelastic.errors import ChannelLost

VARIABLE = "TORCHELASTIC_CHANNEL_FD"
#: Longest message in bytes, below the 208 KiB that Linux lets a unix socket take in one piece.
LIMIT = 128 * 1024

_opened: tuple[int, socket.socket | None] | None = None


def send(message: Mapping[str, Any], *, timeout: float = 0.0) -> None:
    """Send to the agent. Waits at most `timeout` seconds; a full socket drops the message."""
    data = json.dumps(message).encode() + b"\n"
    if len(data) > LIMIT:
        raise ValueError(f"The message to the agent is {len(data)} bytes; the limit is {LIMIT}.")
    channel = _channel()
    if channel is None:
        return
    if timeout:
        _wait_for_room(channel, timeout)
    try:
        transmit(channel, data)
    except OSError:
        return  # the agent is busy or gone: training matters more


def transmit(end: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one message, and copies of descriptors, now; `BlockingIOError` if there is no room.

    Neither this nor `receive` uses `socket.send_fds` and `recv_fds`, which ignore their flags in
    Python 3.11: they would block, and programs started later would inherit descriptors.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    end.sendmsg([data], rights if descriptors else [], flags)


def receive(end: socket.socket, flags: int = 0) -> tuple[bytes, list[int], int]:
    """Return one message, the descriptors that came with it, and the kernel's flags."""
    descriptors = array("i")
    room = socket.CMSG_LEN(descriptors.itemsize)
    data, ancillary, told, _ = end.recvmsg(LIMIT, room, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content)
    return data, list(descriptors), told


def _wait_for_room(channel: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLOUT)
    poll.poll(seconds * 1000)


def adopt() -> None:
    """Make the descriptor private to this process: programs it starts are not workers."""
    descriptor = _descriptor()
    if descriptor is not None:
        os.set_inheritable(descriptor, False)


def _channel() -> socket.socket | None:
    """Return this process's channel; None in a forked child."""
    global _opened
    if _opened is None or _opened[0] != os.getpid():
        _opened = (os.getpid(), _open())
    return _opened[1]


def _open() -> socket.socket | None:
    descriptor = _descriptor()
    if descriptor is None:
        return None
    try:
        channel = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if _peer(channel) == os.getppid():
        return channel
    # Another socket with this number, or our parent's channel: close only the copy.
    channel.close()
    return None


def _descriptor() -> int | None:
    text = env.get(VARIABLE)
    return int(text) if text.isdecimal() else None


def _peer(channel: socket.socket) -> int:
    """Return the process that created the socket; for a worker that is its parent, the agent."""
    try:
        made_by = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return 0
    return int(struct.unpack("3i", made_by)[0])


# --- the channel of an in-process worker, which relies on it --------------------------------------


class WorkerLink:
    """A worker's end of a reliable channel: a message arrives, or sending raises.

    A forked child has a copy of the descriptor. It may close its copy, but must not send: `tell`
    raises in every process but the one that created the link.
    """

    def __init__(self, end: socket.socket) -> None:
        """The link takes ownership of `end`."""
        self._end = end
        self._worker = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def tell(
        self, message: Mapping[str, Any], descriptors: Sequence[int] = (), *, timeout: float = 30.0
    ) -> None:
        """Send, waiting for room up to `timeout` seconds; `ChannelLost` if it cannot be sent.

        The agent gets copies of `descriptors`.
        """
        if os.getpid() != self._worker:
            raise ChannelLost("Only the worker itself may send to its agent, not a child process.")
        data = json.dumps(message).encode() + b"\n"
        deadline = time.monotonic() + timeout
        while not self._sent(data, descriptors):
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelLost(
                    f"Timed out: the agent accepted no message for {timeout:g} seconds."
                )
            _wait_for_room(self._end, left)

    def _sent(self, data: bytes, descriptors: Sequence[int]) -> bool:
        try:
            transmit(self._end, data, descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelLost(
                f"Lost the connection to the agent: could not send ({error})."
            ) from None
        return True

    def receive(self, *, timeout: float | None = None) -> tuple[dict[str, Any], int | None] | None:
        """Return the next message and its descriptor, which the caller closes.

        Waits at most `timeout` seconds, if given. None if there was no message, or after `wake`;
        `ChannelLost` when the agent's end is closed.
        """
        if not self.is_ready(timeout=timeout):
            return None
        try:
            data, descriptors, _ = receive(self._end)
        except OSError as error:
            raise ChannelLost(
                f"Lost the connection to the agent: could not receive ({error})."
            ) from None
        if not data:
            raise ChannelLost("The agent is gone.")
        return json.loads(data), descriptors[0] if descriptors else None

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Wait like `receive`, but do not take the message."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        ready = poll.poll(None if timeout is None else timeout * 1000)
        return bool(ready) and all(descriptor != self._wake for descriptor, _ in ready)

    def wake(self) -> None:
        """Make the current or the next `receive` return."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close this end. First end the thread that receives."""
        os.close(self._wake)
        self._end.close()


def link() -> WorkerLink | None:
    """Return the channel to this worker's agent; None in a process that is not a worker."""
    channel = _channel()
    return WorkerLink(channel.dup()) if channel is not None else None
