"""What a user of this machine may ask an agent: over a socket that is that user's alone.

`agent.sock` lies beside the agent's entry in the registry of jobs, in a directory and with a mode
that let nobody else in; and whoever connects all the same is looked at. One line is asked, one
answered, and nothing is changed by it.
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

from torchelastic.agent.watch.inspector import Found, Inspector, from_json, to_json

logger = logging.getLogger(__name__)

SOCKET_FILE = "agent.sock"
#: What is asked.
STACKS = b"stacks\n"
#: Seconds an agent may take: it asks the others, which have two.
PATIENCE = 10.0
#: Bytes of an answer.
MOST = 64 << 20
#: Seconds somebody has to say what it wants, and how many may at once.
_SAY, _GUESTS = 5.0, 16


class QuerySocket:
    """The agent's end."""

    def __init__(self, directory: Path, doings: Inspector) -> None:
        self._path = directory / SOCKET_FILE
        self._inspector = doings
        self._server: asyncio.AbstractServer | None = None
        self._visitors: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen. A job runs without it, too: what does not work is said, and is no error."""
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
        for task in self._visitors:
            task.cancel()
        if self._visitors:
            await asyncio.wait(self._visitors)
        self._path.unlink(missing_ok=True)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._visitors.add(task)
        try:
            if len(self._visitors) <= _GUESTS and _is_ours(writer.get_extra_info("socket")):
                await self._answer(reader, writer)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            logger.debug("a query failed: %r", error)
        finally:
            self._visitors.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await asyncio.wait_for(reader.readline(), _SAY)
        if asked == STACKS:
            found = await self._inspector.everywhere()
            writer.write(json.dumps(to_json(found)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), _SAY)


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
    """An address of a socket, which may have 107 bytes only, for a path of any length."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _is_ours(end: socket.socket) -> bool:
    """Whether the other end is this user's, or root's."""
    packed = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", packed)[1] in (os.geteuid(), 0)


def ask(directory: Path) -> Found:
    """What all ranks do, as the agent with this directory finds out; `OSError` if it cannot say."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(PATIENCE)
        with _short(directory / SOCKET_FILE) as address:
            end.connect(address)
        end.sendall(STACKS)
        with end.makefile("rb") as answer:
            line = answer.readline(MOST)
    try:
        return from_json(json.loads(line))
    except ValueError as error:
        raise OSError(f"cannot parse its answer: {error}") from None
