"""`--dashboard`: start, watch and stop the process that shows the job in the browser.

It is a separate process that only reads what the agent writes: whatever happens to it does not
affect the agent. It reports its address once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torchelastic
from torchelastic.agent.failure_report import exit_words
from torchelastic.agent.spawn.processes import start_program
from torchelastic.config import LaunchConfig
from torchelastic.errors import SpawnError
from torchelastic.system import linux
from torchelastic.transport.credentials import read_secret

logger = logging.getLogger(__name__)

MODULE = "torchelastic.dashboard"
#: Seconds it has to show the end of the job to open browsers.
LAST_PAGE_TIMEOUT = 3.0
#: Bytes that are read at a time; its lines are shorter.
READ_BYTES = 64 * 1024


class DashboardProcess:
    """Create it first, so that a bad configuration is rejected early; then start it."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._token_file = ""
        if config.dashboard_token_file is not None:
            read_secret(config.dashboard_token_file, "--dashboard-token-file")
            self._token_file = os.path.abspath(config.dashboard_token_file)
        self._channel: socket.socket | None = None
        self._pidfd = -1
        #: Its exit code, once it has ended.
        self._ended: asyncio.Future[int]

    @classmethod
    def wanted(cls, config: LaunchConfig) -> DashboardProcess | None:
        """None if it is not configured. Raises `ConfigError` if it is not possible."""
        return cls(config) if config.dashboard else None

    def start(self, env: Mapping[str, str], node: str) -> set[int]:
        """Start it; return its pid, if it could be started.

        Call in the main thread: it dies with the thread that starts it.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", MODULE, self._config.run_id, node]
        command += [self._config.dashboard, *filter(None, [self._token_file])]
        with theirs:
            try:
                streams = (theirs.fileno(), theirs.fileno(), 2)
                pid = start_program(command, env=env, streams=streams, prepare=_prepare)
            except SpawnError as error:
                ours.close()
                logger.warning("Could not start the dashboard: %s The job continues.", error)
                return set()
        ours.setblocking(False)
        self._channel, self._pidfd = ours, os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_reader(self._pidfd, self._notice_end)
        return {pid}

    def _notice_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended.set_result(linux.exitcode(self._pidfd) or 0)

    async def watch(self, say: Callable[[str], None]) -> None:
        """Log the address of the page and, if it exits before the job, that."""
        if self._channel is None:
            return
        told: dict[str, str] = {}
        rest = b""
        while data := await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES):
            *lines, rest = (rest[-READ_BYTES:] + data).split(b"\n")
            for line in lines:
                told = told or _heard(line)
        await asyncio.wait({self._ended})
        if "error" in told:
            say(f"no dashboard at {self._config.dashboard}: {told['error']}; the job continues")
        else:
            say(f"the dashboard exited: {exit_words(self._ended.result())}; the job continues")

    async def close(self) -> None:
        """Stop it, after open browsers have seen the end of the job."""
        if self._channel is None:
            return
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._ended}, timeout=LAST_PAGE_TIMEOUT)
        if not self._ended.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await asyncio.wait({self._ended})
        os.close(self._pidfd)
        self._channel.close()

    def again(self, run_dir: Path) -> str:
        """The command that shows the job later, where its events are kept longest."""
        kept = self._config.log_dir not in (None, os.devnull)
        return (
            f"torchelastic dashboard {shlex.quote(str(run_dir) if kept else self._config.run_id)}"
        )


def _heard(line: bytes) -> dict[str, str]:
    """A message of the process; empty for other output: a user's start-up code may print, too."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    told = said if isinstance(said, dict) and said.keys() & {"url", "error"} else {}
    if "url" in told:
        # Not an event: the address contains the token, and others may read events.
        logger.info("dashboard: %s", told["url"])
    return told


def _prepare() -> None:
    """Lower the priority, and leave a directory whose files `-m` would import instead of ours."""
    linux.give_way()
    os.chdir(Path(torchelastic.__file__).parents[1])
