"""The store as a process of its own, for one job or for many: `torchelastic rendezvous serve`.

It serves like an agent's store, but never leads and never takes over (its term is 0). Each job has
its own table. With a state file, every change is on disk before a client is told of it: to its
clients, a server that is killed and restarted only looks slow.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial

from torchelastic.clock import Clock, SystemClock
from torchelastic.config import LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.errors import ConfigError, LeaseExpired, RendezvousLost
from torchelastic.rendezvous.embedded import state_file
from torchelastic.rendezvous.embedded.server import EmbeddedServer
from torchelastic.rendezvous.embedded.state_file import Entry, KeptJob, RecordedTable, StateFile
from torchelastic.rendezvous.world import WORLD_KEY
from torchelastic.transport import credentials, frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS, Credentials
from torchelastic.transport.link import Link
from torchelastic.transport.listener import Listener

log = logging.getLogger(__name__)

#: The most jobs at a time: without a secret, any client can create one.
JOBS_LIMIT = 1024
#: Seconds between two checks whether a job without clients can be forgotten.
IDLE_CHECK_INTERVAL = 1.0
SERVER_STOPPED = "The rendezvous server was stopped."


class RendezvousService:
    """Serves the stores of jobs. Must be created in a running loop."""

    def __init__(
        self,
        *,
        job: str | None = None,
        credentials: Credentials = ANONYMOUS,
        state_file: str | None = None,
        on_failure: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """`job` is the only job served; None: any job. `on_failure` is called when the state file
        can no longer be written. Raises `ConfigError` if the state file cannot be used."""
        self._job = job
        self._clock = clock or SystemClock()
        self._listener = Listener(job, secret=credentials.secret, tls=credentials.server_tls)
        self._listener.serve(frames.STORE, self._admit)
        self._file = StateFile(state_file) if state_file else None
        self._kept = self._take_up()
        self._servers: dict[str, EmbeddedServer] = {}
        self._on_failure = on_failure
        #: Why the state file cannot be written any more.
        self.failure: RendezvousLost | None = None

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs, oldest first."""
        return tuple(self._kept)

    async def listen(self, sockets: Sequence[socket.socket]) -> int:
        """Serve on these sockets; returns the port."""
        for job in [*self._kept]:
            self._serve(job)
            self._servers[job].resume()
            self._look_after(job)
        return await self._listener.listen(sockets)

    async def close(self) -> None:
        """Stop. With a state file, clients are not told: they wait for the next server."""
        await self._listener.close()
        for server in self._servers.values():
            if self._file is None:
                await server.close(SERVER_STOPPED)
            else:
                await server.abandon()
        if self._file is not None:
            self._file.close()

    # Clients

    def _admit(self, link: Link, hello: frames.Hello) -> None:
        if hello.job not in self._kept:
            if len(self._kept) >= JOBS_LIMIT:
                link.send(frames.Refusal("This server already has the maximum number of jobs."))
                link.close()
                return
            self._begin(hello.job)
        self._servers[hello.job].admit(link, hello)
        link.ended.add_done_callback(lambda _: self._look_after(hello.job))

    def _begin(self, job: str) -> None:
        self._kept[job] = KeptJob(secrets.token_hex(8), RecordedTable(job))
        self._write(["new", job, self._kept[job].name], True)
        self._serve(job)
        log.info("Job '%s' started.", job)

    def _serve(self, job: str) -> None:
        kept = self._kept[job]
        kept.table.record = self._write if self._file is not None else None
        self._servers[job] = EmbeddedServer(
            job, clock=self._clock, table=kept.table, name=kept.name
        )

    def _look_after(self, job: str) -> None:
        """Forget a finished job after its last client has left, so that its id can be used again.

        An unfinished job is kept for its generation: all its nodes may restart.
        """
        server = self._servers.get(job)
        if server is None or server.clients or self._listener.is_closing:
            return
        table = self._kept[job].table
        if table.next_deadline() is not None:  # a client may come back
            asyncio.get_running_loop().call_later(
                IDLE_CHECK_INTERVAL, partial(self._look_after, job)
            )
        elif _is_over(table):
            log.info("Job '%s' ended.", job)
            del self._kept[job], self._servers[job]
            self._write(["forget", job], True)

    # The state file

    def _take_up(self) -> dict[str, KeptJob]:
        """Load the jobs of the state file, and rewrite the file with only these."""
        if self._file is None:
            return {}
        try:
            kept = self._jobs_in(self._file)
            self._file.rewrite(state_file.snapshot(kept))
        except BaseException:
            self._file.close()
            raise
        return kept

    def _jobs_in(self, file: StateFile) -> dict[str, KeptJob]:
        entries = file.read()
        try:
            kept = state_file.replay(entries, self._clock.now())
        except (KeyError, TypeError, ValueError, AssertionError, LeaseExpired) as error:
            how = f"inconsistent entries: {type(error).__name__} {error}"
            raise ConfigError(state_file.damaged(file.path, how)) from error
        foreign = [job for job in kept if self._job is not None and job != self._job]
        if foreign:
            raise ConfigError(
                f"The state file {file.path} belongs to job '{foreign[0]}', not to "
                f"'{self._job}': name another one in --state-file."
            )
        return kept

    def _write(self, entry: Entry, lasting: bool) -> None:
        if self._file is None:
            return
        try:
            self._file.append(entry, lasting=lasting)
            if self._file.is_long:
                self._file.rewrite(state_file.snapshot(self._kept))
        except (OSError, ConfigError) as error:
            # No server is better than one that confirms changes it would not know after a restart.
            self.failure = RendezvousLost(
                f"The state file {self._file.path} cannot be written: {error}."
            )
            self._on_failure()
            raise self.failure from error


def _is_over(table: RecordedTable) -> bool:
    """Return whether a job has nothing left that its nodes need."""
    rows = {row.key: row.text for row in table.get("")}
    world = rows.get(WORLD_KEY)
    return not rows or (world is not None and json.loads(world).get("phase") == "closed")


# --- its process ---------------------------------------------------------------------------------

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(config: LaunchConfig, endpoint: str, state_file: str | None) -> None:
    """Serve until a signal asks to stop.

    `config` has the credentials, and the job's id if only one job is served. Raises `ConfigError`
    for invalid settings, `RendezvousLost` when the state file fails.
    """
    asyncio.run(_run(config, endpoint, state_file))


async def _run(config: LaunchConfig, endpoint: str, state_file: str | None) -> None:
    stop = asyncio.Event()
    for signum in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    host, port = parse_endpoint(endpoint)
    shown = credentials.load(config)
    # First: clients of the last server already have a port to wait at.
    sockets = bind_endpoint(host, port, is_host=True)
    if sockets is None:
        raise ConfigError(
            f"Cannot serve at {endpoint}: another process uses the port, or this machine does "
            "not have that address. Choose another --endpoint."
        )
    try:
        service = RendezvousService(
            job=config.run_id or None,
            credentials=shown,
            state_file=state_file,
            on_failure=stop.set,
        )
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    port = await service.listen(sockets)
    jobs = f"job '{config.run_id}'" if config.run_id else "any job"
    # For users, and for scripts that asked for port 0.
    print(f"Serving the rendezvous of {jobs} at {format_endpoint(host, port)}.", flush=True)
    await stop.wait()
    await service.close()
    if service.failure is not None:
        raise service.failure
