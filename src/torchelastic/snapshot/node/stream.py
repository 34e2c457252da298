"""A snapshot stream between two agents: fixed-size headers and raw bytes.

The connection was authenticated like any other (`transport.listener`), so both ends belong to the
job. From here on it has no frames: bytes are sent from and received into the snapshot memory. Calls
block, so only one thread uses a stream at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NoReturn

from torchelastic.errors import WireError
from torchelastic.snapshot.layout import Version, checksum, rank_of
from torchelastic.transport.tls import TlsPipe

#: Bytes sent or received at a time: few enough to stay in the CPU cache for the checksum and write.
CHUNK = 1 << 20
#: Seconds of the rate limit that may be saved up and spent at once (the burst).
BURST = 0.1
#: Seconds without a byte before giving up; fewer within a header, which comes in one piece: a peer
#: that sends half of one must not block a thread.
SILENCE_TIMEOUT, HEADER_TIMEOUT = 30, 5
#: The largest size in a header; more is certainly invalid.
MOST_BYTES = 1 << 46
MOST_SKELETON = 1 << 30

_MAGIC = b"TESN"
#: magic, kind, piece, origin, generation, step, rank, size, room, skeleton room, bytes, skeleton,
#: checksum; generation and step of the version before.
_HEADER = struct.Struct(">4sB24s32sqqqqQQQQIqq")
#: No version.
NONE: Version = (-1, -1)
#: kind, bytes of the sentence.
_REPLY = struct.Struct(">BH")

#: Kinds of headers: take this; give me that; here it is; give me the freshest that you have.
GIVE, WANT, FOUND, FRESHEST = 1, 2, 3, 4
#: Kinds of replies: go on; I have it; no; others come first, another reply follows.
GO, HAVE, NO, WAIT = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Header:
    """The description of a version that follows or is requested."""

    kind: int
    piece: str
    version: Version
    #: The node whose worker has written it.
    origin: str = ""
    rank: int = 0
    size: int = 1
    #: The capacity of its memory.
    room: int = 0
    skeleton_room: int = 0
    used: int = 0
    skeleton: int = 0
    checksum: int = 0
    #: The next older version that the sender holds; it has dropped those between.
    before: Version = NONE

    def pack(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            self.kind,
            self.piece.encode(),
            self.origin.encode(),
            *self.version,
            self.rank,
            self.size,
            self.room,
            self.skeleton_room,
            self.used,
            self.skeleton,
            self.checksum,
            *self.before,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Parse a header; `WireError` if it is invalid."""
        magic, kind, piece, origin, generation, step, *rest = _HEADER.unpack(data)
        try:
            named, made_by = _text(piece), _text(origin)
            rank_of(named)
        except ValueError as error:
            raise WireError(f"Invalid piece in the header of a snapshot: {error}.") from None
        rank, size, room, skeleton_room, used, skeleton, summed, *before = rest
        if (
            magic != _MAGIC
            or kind not in (GIVE, WANT, FOUND, FRESHEST)
            or not (0 <= rank < size and generation >= 0 and step >= 0)
            or not (used <= room <= MOST_BYTES and skeleton <= skeleton_room <= MOST_SKELETON)
        ):
            raise WireError("Invalid header of a snapshot.")
        return cls(
            kind=kind,
            piece=named,
            version=(generation, step),
            origin=made_by,
            rank=rank,
            size=size,
            room=room,
            skeleton_room=skeleton_room,
            used=used,
            skeleton=skeleton,
            checksum=summed,
            before=(before[0], before[1]),
        )


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii")


class Closed(Exception):
    """We have closed this end."""


class SnapshotStream:
    """One end of a stream. After OSError, EOFError or WireError it is unusable."""

    def __init__(self, connection: socket.socket, tls: TlsPipe | None) -> None:
        """The stream takes over the connection."""
        connection.setblocking(True)
        self._connection = connection
        self._allow(socket.SO_SNDTIMEO, SILENCE_TIMEOUT)
        self._allow(socket.SO_RCVTIMEO, SILENCE_TIMEOUT)
        self._tls = tls
        #: Decrypted bytes that were not read yet.
        self._plain = bytearray()
        self._over = threading.Event()

    def _allow(self, option: int, seconds: int) -> None:
        """Set the socket's timeouts in the kernel: cheaper than a poll before every call."""
        limit = struct.pack("ll", seconds, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, option, limit)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def has_more(self) -> bool:
        """Whether there are decrypted bytes that the socket no longer reports."""
        return bool(self._plain)

    def has_ended(self) -> bool:
        """Return whether the other end of an idle connection is closed."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hang_up(self) -> None:
        """Interrupt the thread that uses this stream. Any thread; `close` must follow."""
        self._over.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise

    def close(self) -> None:
        self._connection.close()

    # --- out -------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._tls is not None:
            self._tls.encrypt(data)
            data = self._tls.outgoing()
        try:
            self._connection.sendall(data)
        except BlockingIOError:
            _is_silent()

    def reply(self, kind: int, sentence: str = "") -> None:
        text = sentence.encode()[:1000]
        self.send(_REPLY.pack(kind, len(text)) + text)

    def send_file(self, descriptor: int, at: int, size: int, wait: Callable[[int], None]) -> None:
        """Send bytes of a file; without TLS they do not pass through this process.

        `wait` is called with the number of bytes before they are sent.
        """
        end = at + size
        while at < end:
            count = min(CHUNK, end - at)
            wait(count)
            if self._tls is None:
                at += self._send_some(descriptor, at, count)
            else:
                self.send(os.pread(descriptor, count, at))
                at += count

    def _send_some(self, descriptor: int, at: int, count: int) -> int:
        try:
            return os.sendfile(self._connection.fileno(), descriptor, at, count)
        except BlockingIOError:
            _is_silent()

    def limited_by(self, bucket: Bucket, lock: threading.Lock) -> Callable[[int], None]:
        """Return a function that waits as the bucket requires, or until this end is closed."""

        def wait(size: int) -> None:
            with lock:
                seconds = bucket.take(size, time.monotonic())
            if self._over.wait(seconds) if seconds else self._over.is_set():
                raise Closed

        return wait

    # --- in --------------------------------------------------------------------------------------

    def receive(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def receive_header(self) -> Header:
        self._allow(socket.SO_RCVTIMEO, HEADER_TIMEOUT)
        data = self.receive(_HEADER.size)
        self._allow(socket.SO_RCVTIMEO, SILENCE_TIMEOUT)
        return Header.unpack(data)

    def receive_reply(self) -> tuple[int, str]:
        kind, length = _REPLY.unpack(self.receive(_REPLY.size))
        sentence = self.receive(length).decode(errors="replace")
        if kind not in (GO, HAVE, NO, WAIT):
            raise WireError("Invalid reply about a snapshot.")
        return kind, sentence

    def receive_into(self, descriptor: int, at: int, size: int) -> None:
        """Receive bytes into a file; without TLS they do not pass through this process.

        Not into a mapping: each page would be cleared and faulted in before it is written.
        """
        end = at + size
        with _Conduit() as conduit:
            while at < end:
                count = min(CHUNK, end - at)
                if self._tls is None:
                    at += self._move_some(conduit, descriptor, at, count)
                else:
                    _write(descriptor, memoryview(self.receive(count)), at)
                    at += count

    def _move_some(self, conduit: _Conduit, descriptor: int, at: int, count: int) -> int:
        try:
            moved = conduit.move(self._connection.fileno(), descriptor, at, count)
        except BlockingIOError:
            _is_silent()
        if not moved:
            raise EOFError("the connection was closed")
        return moved

    def receive_summed(self, descriptor: int, at: int, size: int) -> int:
        """Do the same, and return the checksum of the bytes."""
        with _Summing() as summing:
            for begin in range(0, size, CHUNK):
                part = summing.buffer()[: min(CHUNK, size - begin)]
                self._fill(part)
                _write(descriptor, part, at + begin)
                summing.add(part)
            return summing.result()

    def _fill(self, room: memoryview) -> None:
        while room:
            count = self._some(room)
            if not count:
                raise EOFError("the connection was closed")
            room = room[count:]

    def _some(self, room: memoryview) -> int:
        """Receive some bytes into the buffer; return how many, 0 at the end."""
        try:
            if self._tls is None:
                return self._connection.recv_into(room)
            return self._decrypted(self._tls, room)
        except BlockingIOError:
            _is_silent()

    def _decrypted(self, tls: TlsPipe, room: memoryview) -> int:
        while not self._plain:
            data = b"" if tls.ended else self._connection.recv(CHUNK)
            if not data:
                return 0
            self._plain += tls.decrypt(data)
            if answer := tls.outgoing():
                self._connection.sendall(answer)
        count = min(len(room), len(self._plain))
        room[:count] = self._plain[:count]
        del self._plain[:count]
        return count


class _Conduit:
    """Moves bytes from a socket to a file, through the pipe that `splice` needs."""

    def __enter__(self) -> _Conduit:
        self._out, self._in = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(PermissionError):  # this user has many: a small one does it, too
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, CHUNK)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)

    def move(self, source: int, descriptor: int, at: int, count: int) -> int:
        """Wait for bytes; return how many were moved, 0 at the end."""
        taken = left = os.splice(source, self._in, count)
        while left:
            moved = os.splice(self._out, descriptor, left, offset_dst=at)
            left, at = left - moved, at + moved
        return taken


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


class _Summing:
    """Computes checksums of received buffers in a thread: that takes longer than receiving.

    It starts a thread only for more than one buffer.
    """

    BUFFERS = 4

    def __init__(self) -> None:
        self._sum = 0
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self._made = 0
        self._thread: threading.Thread | None = None

    def buffer(self) -> memoryview:
        """Wait for a free buffer and return it."""
        if self._made < self.BUFFERS and self._free.empty():
            self._made += 1
            self._free.put(memoryview(bytearray(CHUNK)))
        return self._free.get()

    def add(self, part: memoryview) -> None:
        """Add the filled part of a buffer."""
        self._full.put(part)
        if self._made > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="snapshot-sum")
            self._thread.start()

    def _run(self) -> None:
        while (part := self._full.get()) is not None:
            self._sum = checksum(part, self._sum)
            self._free.put(memoryview(part.obj))

    def result(self) -> int:
        """Return the checksum of everything added."""
        self._full.put(None)
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
            self._thread = None
        return self._sum

    def __enter__(self) -> _Summing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:  # something has gone wrong
            self.result()


def _is_silent() -> NoReturn:
    raise TimeoutError("timed out: no data is moving")


# --- the bandwidth limit --------------------------------------------------------------------------


class Bucket:
    """A token bucket that limits bytes to a rate."""

    def __init__(self, rate: float) -> None:
        """`rate` in bytes per second; 0 means no limit."""
        self._rate = rate
        self._has = rate * BURST
        self._at: float | None = None

    def take(self, size: int, now: float) -> float:
        """Take this many bytes; return the seconds to wait before sending them.

        >>> bucket = Bucket(1000)
        >>> bucket.take(100, 0.0), bucket.take(500, 0.0), bucket.take(100, 1.0)
        (0.0, 0.5, 0.0)
        """
        if not self._rate:
            return 0.0
        since = now - self._at if self._at is not None else 0.0
        self._at = now
        # May be negative: an earlier caller has taken future bytes, and waits for them.
        self._has = min(self._has + since * self._rate, self._rate * BURST) - size
        return max(0.0, -self._has / self._rate)
