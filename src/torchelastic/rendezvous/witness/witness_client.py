"""The agent's end of the process that accesses the witness's storage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchelastic
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.witness.witness_storage import Json
from torchelastic.system import die_with_owner

logger = logging.getLogger(__name__)

MODULE = "torchelastic.rendezvous.witness.witness_storage"
#: Seconds to wait for the storage.
ANSWER_TIMEOUT = 5.0
#: Seconds between two checks whether a killed process has ended.
POLL_INTERVAL = 0.01


class WitnessSilent(Exception):
    """The storage did not answer, or not correctly: nothing is known."""


class WitnessClient:
    """Sends one request at a time. The process starts with the first one, and again when it is
    stuck."""

    def __init__(self, url: str, on_child: Callable[[int], None] = lambda pid: None) -> None:
        """`on_child` is called with every process that is started, at once."""
        self._url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
        self._on_child = on_child
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        #: Killed processes that may be stuck in the kernel.
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, do: str, key: str, value: Json | None = None) -> Json:
        """The storage's answer; raises `WitnessSilent`, or `ConfigError` for an unusable URL."""
        try:
            found = await asyncio.wait_for(self._ask(do, key, value), ANSWER_TIMEOUT)
        except asyncio.TimeoutError:
            raise WitnessSilent(f"no answer within {ANSWER_TIMEOUT:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise WitnessSilent(f"its client process exited: {error!r}") from error
        if "refused" in found:
            raise ConfigError(str(found["refused"]))
        if "error" in found:
            raise WitnessSilent(str(found["error"]))
        return found

    async def _ask(self, do: str, key: str, value: Json | None) -> Json:
        async with self._turn:
            try:
                if self._writer is None:
                    await self._start()
                assert self._reader is not None
                assert self._writer is not None
                request = {"do": do, "key": key, "value": value}
                self._writer.write(json.dumps(request).encode() + b"\n")
                line = await self._reader.readline()
                if not line:
                    raise EOFError("no output")
                found: dict[str, Any] = json.loads(line)
                return found
            except BaseException:  # a late answer would be taken for that of the next request
                self._drop()
                raise

    async def _start(self) -> None:
        while any(process.poll() is None for process in self._stuck):
            await asyncio.sleep(POLL_INTERVAL)  # do not start one more for each request
        self._stuck.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            owned = [sys.executable, die_with_owner.__file__, str(os.getpid())]
            asks = [sys.executable, "-m", MODULE, str(theirs.fileno()), self._url]
            self._process = subprocess.Popen(
                [*owned, *asks],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Not the working directory: `-m` would search a user's files.
                cwd=Path(torchelastic.__file__).parents[1],
            )
        self._on_child(self._process.pid)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        if self._process is not None:
            self._process.kill()
            self._stuck.append(self._process)
        self._process = self._reader = self._writer = None

    async def close(self) -> None:
        """Stop the process; a stuck one is left to the kernel."""
        self._drop()
        for process in self._stuck:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 1.0)
