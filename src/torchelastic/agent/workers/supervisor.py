"""Start, watch and stop the workers of one generation and all they have started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGCHLD, SIGCONT, SIGKILL, SIGTERM, pidfd_send_signal
from typing import Any

from torchelastic.agent.spawn.processes import WorkerSpawn, default_python, spawn_plain
from torchelastic.agent.spawn.zygote_client import Zygote
from torchelastic.errors import SpawnError
from torchelastic.events.failure import signal_name
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup
from torchelastic.transport.auth import Secret
from torchelastic.worker import channel, handed_secret, stack_dump

__all__ = ["Supervisor", "WorkerExit", "WorkerSpawn"]

logger = logging.getLogger(__name__)

#: Seconds between two warnings about a process that does not die.
UNKILLABLE_WARNING_INTERVAL = 10.0
#: Messages read from one worker before another one gets its turn.
BURST = 64


@dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker."""

    local_rank: int
    pid: int
    #: As `subprocess` has it: the exit code, or minus the signal's number.
    exitcode: int


@dataclass(frozen=True)
class _Worker:
    local_rank: int
    pid: int
    pidfd: int
    #: Our end of its channel.
    channel: socket.socket
    #: The memory that it writes its stacks to.
    stacks: int


class Supervisor:
    """Watches by pidfd, never by polling. All of it runs in the event loop of one process, which
    must be a subreaper (`guard.guarded` makes it one), so that orphans come to it."""

    def __init__(
        self,
        *,
        zygote: Zygote | None,
        cgroup: Cgroup | None,
        on_exit: Callable[[WorkerExit], None],
        on_message: Callable[[int, dict[str, Any]], None],
        on_handed: Callable[[int, dict[str, Any], int], None] | None = None,
        python: str | None = None,
        secret: Secret | None = None,
    ) -> None:
        """`secret` is the job's, handed to every worker.

        A message that comes with a descriptor goes to `on_handed`, which has to close it.
        """
        #: Children that are not workers and must not be taken for their orphans. Add a helper
        #: before anything else is awaited.
        self.exempt: set[int] = set(linux.children())
        if zygote is not None:
            self.exempt -= zygote.preforks()  # it is asked each time
        self._zygote: Zygote | None = None
        self._cgroup = cgroup
        if zygote is not None:
            self.use_zygote(zygote)
        self._on_exit = on_exit
        self._on_message = on_message
        self._on_handed = on_handed
        self._python = python or default_python()
        self._secret = secret
        self._workers: dict[int, _Worker] = {}
        #: Of this generation's workers, including those that have exited.
        self._cgroups: list[Cgroup] = []
        #: Set when a worker has ended, and when the last one has.
        self._one_less = asyncio.Event()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._said_plain = False
        self._giving_up = False

    def use_zygote(self, zygote: Zygote) -> None:
        """Fork workers from this zygote from now on."""
        self._zygote = zygote
        self._said_plain = False
        if self._cgroup is not None:
            zygote.use_cgroup(self._cgroup)

    @property
    def alive(self) -> tuple[int, ...]:
        """Local ranks of the workers that have not ended."""
        return tuple(sorted(self._workers))

    # --- starting --------------------------------------------------------------------------------

    async def start(self, spawns: Sequence[WorkerSpawn]) -> dict[int, int]:
        """Start all these workers or none; returns local rank -> pid."""
        asyncio.get_running_loop().add_signal_handler(SIGCHLD, self._reap_strays)
        others = bool(self._workers)
        try:
            return {spawn.local_rank: await self._start(spawn) for spawn in spawns}
        except BaseException:
            if not others:
                await self._give_up()
            raise

    async def _give_up(self) -> None:
        self._giving_up = True  # we stop them: not failures
        try:
            await self.stop(SIGKILL, timeout=0.0)
        finally:
            self._giving_up = False

    async def _start(self, spawn: WorkerSpawn) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stacks = stack_dump.create()
        inherited = {channel.VARIABLE: theirs.fileno()}
        if spawn.entry.kind != "program":
            inherited[stack_dump.VARIABLE] = stacks
        if self._secret is not None:
            inherited[handed_secret.VARIABLE] = handed_secret.offer(self._secret)
        with theirs:
            try:
                pid = await self._spawn(spawn, inherited)
            except BaseException:
                ours.close()
                os.close(stacks)
                raise
            finally:
                if self._secret is not None:
                    os.close(inherited[handed_secret.VARIABLE])
        worker = _Worker(spawn.local_rank, pid, os.pidfd_open(pid), ours, stacks)
        self._workers[spawn.local_rank] = worker
        self._none_left.clear()
        if self._cgroup is not None:
            self._cgroups.append(self._cgroup.of(pid))
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.pidfd, self._ended, worker)
        loop.add_reader(worker.channel, self._hear, worker)
        return pid

    async def _spawn(self, spawn: WorkerSpawn, inherited: Mapping[str, int]) -> int:
        if self._zygote is not None and spawn.entry.kind != "program":
            try:
                return await self._zygote.fork(spawn, inherited, self._cgroup)
            except SpawnError as error:
                self._say_plain(str(error))
        return spawn_plain(spawn, python=self._python, inherited=inherited, cgroup=self._cgroup)

    def _say_plain(self, reason: str) -> None:
        if not self._said_plain:
            logger.warning("Workers start as plain processes (slower): %s.", reason)
        self._said_plain = True

    # --- speaking --------------------------------------------------------------------------------

    def pid(self, local_rank: int) -> int | None:
        """The pid of a worker that has not exited."""
        worker = self._workers.get(local_rank)
        return worker.pid if worker is not None else None

    def stack_memory(self, local_rank: int) -> int | None:
        """The memory to which a worker that has not exited writes its stacks (`stack_dump`)."""
        worker = self._workers.get(local_rank)
        return worker.stacks if worker is not None else None

    def has_ended(self, local_rank: int) -> bool:
        """True if a worker has exited, even if that is not reported yet."""
        worker = self._workers.get(local_rank)
        return worker is not None and linux.has_ended(worker.pidfd)

    def tell(self, local_rank: int, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message and descriptors to a worker; ignore one that has exited."""
        worker = self._workers.get(local_rank)
        if worker is None:
            return
        data = json.dumps(message).encode()
        try:
            channel.transmit(worker.channel, data, fds)
        except ConnectionError:
            return  # it has exited, which is reported elsewhere
        except OSError as error:  # it no longer reads; the hang watchdog notices a hang
            logger.warning("cannot send to worker %d: %s", local_rank, error)

    def kill(self, local_rank: int) -> None:
        """Kill one worker's process group."""
        worker = self._workers.get(local_rank)
        if worker is not None:
            self._signal(worker, SIGKILL)

    # --- watching --------------------------------------------------------------------------------

    def _ended(self, worker: _Worker) -> None:
        exitcode = linux.exitcode(worker.pidfd)
        if exitcode is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        while self._hear(worker):  # its last messages come before its exit
            continue
        loop.remove_reader(worker.channel)
        worker.channel.close()
        os.close(worker.stacks)
        if self._workers.get(worker.local_rank) is worker:  # and not one started in its place
            del self._workers[worker.local_rank]
        self._one_less.set()
        if not self._workers:
            self._none_left.set()
        if not self._giving_up:
            self._on_exit(WorkerExit(worker.local_rank, worker.pid, exitcode))
        if exitcode != 0:
            self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        """Kill what a failed worker has started, so that it does not disturb its replacement."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, SIGKILL)
        if self._cgroup is not None:
            self._cgroup.of(worker.pid).kill()

    def _hear(self, worker: _Worker) -> bool:
        """Pass on what the worker has sent; True if there may be more.

        The end of a channel says nothing: children may hold it open after the worker's end.
        """
        for _ in range(BURST):
            try:
                data, fds, flags = channel.receive(worker.channel, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except ConnectionError:
                data, fds, flags = b"", [], 0
            if not data:
                _close_all(fds)
                asyncio.get_running_loop().remove_reader(worker.channel)
                return False
            message = None if flags & socket.MSG_TRUNC else _parse(data)
            self._pass_on(worker.local_rank, message, fds)
        return True

    def _pass_on(self, local_rank: int, message: dict[str, Any] | None, fds: list[int]) -> None:
        """Handle a message; an error in it must not affect the next, or the exit."""
        try:
            self._take(local_rank, message, fds)
        except Exception:
            logger.exception("Could not handle a message from worker %d.", local_rank)

    def _take(self, local_rank: int, message: dict[str, Any] | None, fds: list[int]) -> None:
        if message is not None and fds and self._on_handed is not None:
            self._on_handed(local_rank, message, fds[0])
            return
        _close_all(fds)  # unexpected
        if message is None:
            logger.debug("ignored an invalid message from worker %d", local_rank)
        else:
            self._on_message(local_rank, message)

    def _reap_strays(self) -> None:
        """Reap exited orphans of workers."""
        if self._zygote is None or not self._zygote.in_flight:  # else it may be a worker
            linux.reap(keep=self.exempt | {worker.pid for worker in self._workers.values()})

    # --- stopping --------------------------------------------------------------------------------

    def signal(self, signum: int) -> None:
        """Send a signal to every worker's process group."""
        for worker in self._workers.values():
            self._signal(worker, signum)

    def _signal(self, worker: _Worker, signum: int) -> None:
        try:
            os.killpg(worker.pid, signum)
        except ProcessLookupError:  # so new that it has no group of its own yet
            pidfd_send_signal(worker.pidfd, signum)

    async def stop(
        self, signum: int = SIGTERM, *, timeout: float, told: Collection[int] = ()
    ) -> None:
        """Stop the workers and whatever they have started; kill them after `timeout` seconds.

        `told` are the local ranks that were told to leave and exit by themselves. The signal is
        sent after they have exited, because losing a peer earlier could make them fail. Returns
        when all are gone.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await self._until_gone(told, timeout)
        self.signal(signum)
        self.signal(SIGCONT)  # a stopped process would not see the signal
        try:
            await asyncio.wait_for(self._none_left.wait(), max(deadline - loop.time(), 0.0))
        except asyncio.TimeoutError:
            if self._workers and signum != SIGKILL:
                ranks = ", ".join(map(str, self.alive))
                after = f"{timeout:g} s after {_asking(signum)}"
                logger.info("killing local ranks that have not exited %s: %s", after, ranks)
        self.signal(SIGKILL)
        for cgroup in self._cgroups:
            cgroup.kill()
        await self._until_none_left()
        await self._kill_strays()
        while self._cgroups:
            self._cgroups.pop().remove()
        asyncio.get_running_loop().remove_signal_handler(SIGCHLD)

    async def _until_gone(self, local_ranks: Collection[int], timeout: float) -> None:
        async def gone() -> None:
            while self._workers.keys() & set(local_ranks):
                self._one_less.clear()
                await self._one_less.wait()

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(gone(), timeout)

    async def _until_none_left(self) -> None:
        while self._workers:
            try:
                await asyncio.wait_for(self._none_left.wait(), UNKILLABLE_WARNING_INTERVAL)
            except asyncio.TimeoutError:
                pids = sorted(worker.pid for worker in self._workers.values())
                logger.warning(
                    "Killed with SIGKILL but still alive: pids %s. Waiting for the kernel.", pids
                )

    async def _kill_strays(self) -> None:
        """Kill the orphans of workers, which are our children now, until there are none."""
        clean = 0
        while clean < 2:  # twice: see `linux.children`
            in_flight = self._zygote is not None and self._zygote.in_flight
            clean = clean + 1 if not in_flight and linux.kill_round(self._helpers) else 0
            if not clean:
                await asyncio.sleep(0.001)

    def _helpers(self) -> set[int]:
        """Our children that are neither workers nor their orphans."""
        return self.exempt | (self._zygote.preforks() if self._zygote is not None else set())

    def kill_everything(self) -> None:
        """Kill all at once, without the event loop: the guard is gone."""
        if self._cgroup is not None:
            self._cgroup.kill()
        linux.kill_descendants()
        if self._cgroup is not None:
            self._cgroup.remove()

    def close(self) -> None:
        """Remove the cgroup, when everything is stopped."""
        if self._cgroup is not None:
            self._cgroup.remove()


def _asking(signum: int) -> str:
    """Describe how workers were asked to exit: by a signal or, with 0, by an order."""
    return signal_name(signum) if signum else "they were told to leave"


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
