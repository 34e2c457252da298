"""The query socket: answers `torchelastic stacks` of the same user on this machine.

`agent.sock` lies beside the agent's entry in the job registry. Directory and file mode admit only
that user, and the peer's user id is checked as well. A query is one line, so is the answer, and it
changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from torchelastic.agent.watch.inspector import Inspector, WorldActivity, from_json, to_json
from torchelastic.side_tasks import TaskSet

logger = logging.getLogger(__name__)

SOCKET_FILE = "agent.sock"
#: The query.
STACKS = b"stacks\n"
#: Seconds an agent may take: it asks the others, which have two seconds.
ANSWER_TIMEOUT = 10.0
#: Bytes of an answer.
MOST_BYTES = 64 << 20
#: Seconds a client has to send its query, and clients at a time.
_QUERY_TIMEOUT, _MOST_CLIENTS = 5.0, 16


class QuerySocket:
    """The agent's end."""

    def __init__(self, directory: Path, inspector: Inspector) -> None:
        self._path = directory / SOCKET_FILE
        self._inspector = inspector
        self._server: asyncio.AbstractServer | None = None
        self._clients = TaskSet()

    async def open(self) -> None:
        """Listen. A failure is logged, and the job runs without the socket."""
        try:
            listening = _bound(self._path)
        except OSError as error:
            logger.warning("`torchelastic stacks` cannot reach this agent (%s).", error)
            return
        self._server = await asyncio.start_unix_server(self._hear, sock=listening, limit=1024)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        await self._clients.close()
        self._path.unlink(missing_ok=True)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) <= _MOST_CLIENTS and _is_ours(writer.get_extra_info("socket")):
                await self._answer(reader, writer)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            logger.debug("a query failed: %r", error)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await asyncio.wait_for(reader.readline(), _QUERY_TIMEOUT)
        if asked == STACKS:
            found = await self._inspector.everywhere()
            writer.write(json.dumps(to_json(found)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), _QUERY_TIMEOUT)


def _bound(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.unlink(missing_ok=True)
        with _short(path) as address:
            listening.bind(address)
        path.chmod(0o600)
    except BaseException:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a socket address, which is limited to 107 bytes, for a path of any length."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _is_ours(end: socket.socket) -> bool:
    """True if the other end belongs to this user or root."""
    packed = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", packed)[1] in (os.geteuid(), 0)


def ask(directory: Path) -> WorldActivity:
    """Ask the agent of this directory what all ranks do; `OSError` if it cannot answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(ANSWER_TIMEOUT)
        with _short(directory / SOCKET_FILE) as address:
            end.connect(address)
        end.sendall(STACKS)
        with end.makefile("rb") as answer:
            line = answer.readline(MOST_BYTES)
    try:
        return from_json(json.loads(line))
    except ValueError as error:
        raise OSError(f"cannot parse its answer: {error}") from None
