"""Run a job on several machines: one ssh per host, their output, signals, and the exit code.

`host_plan` decides; this loop performs. Losing this process, or its machine, does not end the job:
the agents continue, and the same command with the same `--rdzv-id` follows them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import re
import shlex
import shutil
import signal
import socket
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from torchelastic import env
from torchelastic.agent.telemetry.reporter import set_up_log
from torchelastic.config import DEFAULT_PORT, Entry, LaunchConfig, format_endpoint
from torchelastic.errors import EXIT_RENDEZVOUS_LOST, EXIT_SIGNAL_BASE, EXIT_USAGE, ConfigError
from torchelastic.hosts import remote
from torchelastic.hosts.host_list import HostSlots, read_hosts
from torchelastic.hosts.host_plan import (
    ANSWER_TIMEOUT,
    Connect,
    HostState,
    LeaveHost,
    StartAgent,
    Status,
    all_refused,
    failed,
    plan,
)
from torchelastic.transport.addresses import loopback_addresses

logger = logging.getLogger(__name__)

#: Seconds between two looks at the list of hosts.
LOOK = 1.0
#: Seconds that agents have to end after the first of them has ended the job.
END_TIMEOUT = 30.0
#: Seconds to wait for output after the end of a host's ssh.
LAST_OUTPUT_TIMEOUT = 2.0
#: Ports that jobs without an endpoint use on their hosts.
PORTS = 500
#: The most hosts of a job whose list may grow.
MOST_HOSTS = 1024
#: Names the remote shell, as GIT_SSH_COMMAND does.
SSH_VARIABLE = "TORCHELASTIC_SSH"
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"

#: Variables that belong to this machine or this login, not to the job.
_OWN = re.compile(
    r"HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|TERM|DISPLAY|TMPDIR|_|LS_COLORS|"
    r"(SSH|XDG|DBUS|BASH_FUNC|TORCHELASTIC_SECRET)_?.*"
)


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """A job, and where its hosts come from."""

    config: LaunchConfig
    entry: Entry
    #: Workers of hosts that name no number: `--nproc-per-node`.
    workers: int | str
    hosts: tuple[HostSlots, ...]
    #: A file or command to ask again while the job runs; empty: the hosts are fixed.
    source: str = ""
    secret: str = field(repr=False)
    #: The endpoint was given: the hosts do not have to be told where the job is.
    meets_elsewhere: bool = False
    #: The id was given: an earlier launcher may have started the job.
    may_run: bool = False


def default_port(run_id: str) -> int:
    """Return the port of a job: the same for the same id, another one for most others."""
    return DEFAULT_PORT + zlib.crc32(run_id.encode()) % PORTS


def run_on_hosts(job: HostJob) -> int:
    """Run a job on its hosts until it ends; return its exit code."""
    shell = shlex.split(env.get(SSH_VARIABLE, _SSH))[0]
    if not all(is_this_machine(host.address) for host in job.hosts) and not shutil.which(shell):
        raise ConfigError(
            f"'{shell}' not found: install OpenSSH, or name another remote shell in {SSH_VARIABLE}."
        )
    set_up_log()
    return asyncio.run(_Launcher(job).run())


class _Host:
    """The ssh to one host and what runs there."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.tasks: list[asyncio.Task[None]] = []
        #: It has an agent, or is starting one.
        self.has_agent = False
        #: Its exit code is that of the job.
        self.saw_end = False

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(line + b"\n")

    def send(self, signum: int) -> None:
        """Send the agent a signal; a host without one is told that none is needed."""
        assert self.process.stdin is not None
        if self.has_agent:
            self.write(str(int(signum)).encode())
        else:
            self.process.stdin.close()


class _Launcher:
    def __init__(self, job: HostJob) -> None:
        self._job = job
        self._wanted = job.hosts
        self._states: dict[str, HostState] = {}
        self._hosts: dict[str, _Host] = {}
        #: Hosts that run or ran last, oldest first.
        self._met_at: list[str] = []
        self._result: int | None = None
        self._interrupted = 0
        self._changed = asyncio.Event()
        self._said: set[str] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, partial(self._interrupt, signum))
        look = asyncio.create_task(self._look()) if self._job.source else None
        while self._result is None and not self._interrupted:
            self._perform()
            self._changed.clear()
            await self._wait(LOOK)
        if look is not None:
            look.cancel()
        await self._end()
        if self._result is not None:
            return self._result
        return EXIT_SIGNAL_BASE + self._interrupted

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except asyncio.TimeoutError:
            return

    async def _end(self) -> None:
        """Wait for the agents that still run; ask those to leave that do not end by themselves."""
        for host in self._hosts.values():
            if not host.has_agent:
                host.send(signal.SIGTERM)
        if self._result is not None:
            await self._wait_for_ends(END_TIMEOUT)
            for host in self._hosts.values():
                host.send(signal.SIGTERM)
        await self._wait_for_ends(self._job.config.shutdown_timeout + END_TIMEOUT)
        for target, host in self._hosts.items():
            logger.warning("%s does not answer: an agent of this job may still run there", target)
            host.process.kill()
        await self._wait_for_ends(END_TIMEOUT)

    async def _wait_for_ends(self, seconds: float) -> None:
        deadline = _now() + seconds
        while self._hosts and _now() < deadline:
            self._changed.clear()
            await self._wait(LOOK)

    async def _look(self) -> None:
        """Ask for the hosts again and again; keep the last answer when that fails."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                self._wanted = await asyncio.to_thread(read_hosts, self._job.source)
            except ConfigError as error:
                self._say_once(f"{error} Keeping the last list of hosts.")

    # --- commands --------------------------------------------------------------------------------

    def _perform(self) -> None:
        now = _now()
        if not self._wanted and not self._hosts:
            self._say_once(f"{self._job.source} lists no hosts. Waiting for one.")
        for command in plan(
            self._wanted, self._states, self._met_at, now, may_run=self._job.may_run
        ):
            match command:
                case Connect(host):
                    before = self._states.get(host.target)
                    failures = before.failures if before is not None else 0
                    self._states[host.target] = HostState("calling", now, failures)
                    task = asyncio.create_task(self._run_host(host))
                    task.add_done_callback(_raise_errors)
                case StartAgent(host, endpoints):
                    self._turn(host.target, "starting")
                    self._hosts[host.target].has_agent = True
                    self._hosts[host.target].write(self._request(host, endpoints))
                case LeaveHost(target):
                    logger.info(
                        "%s is not in the list of hosts any more: it leaves the job", target
                    )
                    self._states[target] = HostState("leaving", now)
                    if target in self._hosts:  # else it is asked once its ssh runs
                        self._hosts[target].send(signal.SIGTERM)
        for target, state in self._states.items():
            if state.status == "starting" and now - state.since > ANSWER_TIMEOUT:
                self._say_once(f"{target} answered, but has not started its agent yet. Waiting.")

    def _turn(self, target: str, status: Status) -> None:
        self._states[target] = dataclasses.replace(
            self._states[target], status=status, since=_now()
        )

    def _interrupt(self, signum: signal.Signals) -> None:
        self._interrupted = self._interrupted or int(signum)
        for host in self._hosts.values():
            host.send(signum)
        self._changed.set()

    # --- one host --------------------------------------------------------------------------------

    async def _run_host(self, host: HostSlots) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *command_for(host),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the agents only through us, once
            )
        except OSError as error:  # too many processes or files, or a list that names hosts only now
            self._say_once(f"Cannot start {command_for(host)[0]} ({error}).")
            self._states[host.target] = failed(self._states[host.target], _now())
            return
        running = self._hosts[host.target] = _Host(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        hello = {"run_id": self._job.config.run_id, "host": host.target}
        running.write(json.dumps(hello).encode())
        running.tasks = [
            asyncio.create_task(self._relay(host, process.stdout, sys.stdout.buffer)),
            asyncio.create_task(self._relay(host, process.stderr, sys.stderr.buffer)),
        ]
        if self._interrupted or self._states[host.target].status == "leaving":
            running.send(signal.SIGTERM)
        self._ended(host, await _exit_of(process, running.tasks))

    def _request(self, host: HostSlots, endpoints: Sequence[str]) -> bytes:
        config = dataclasses.replace(self._job.config, rdzv_secret_file=None, notes=())
        if not self._job.meets_elsewhere:
            port = default_port(config.run_id)
            places = ",".join(format_endpoint(address, port) for address in endpoints)
            config = dataclasses.replace(config, rdzv_endpoint=places)
        request = {
            "config": config.to_json(),
            "entry": dataclasses.asdict(self._job.entry),
            "workers": host.slots or self._job.workers,
            "secret": self._job.secret,
            "directory": str(Path.cwd()),
            "environ": handed_on(env.snapshot()),
        }
        return json.dumps(request).encode()

    async def _relay(self, host: HostSlots, stream: asyncio.StreamReader, out: BinaryIO) -> None:
        while line := await _read_line(stream):
            text = line.rstrip(b"\n").decode(errors="replace")
            if text in remote.MARKS:
                self._heard(host, text)
            else:
                with contextlib.suppress(OSError):  # nobody reads it; the agents must not wait
                    out.write(f"[{host}] ".encode() + line)
                    out.flush()

    def _heard(self, host: HostSlots, mark: str) -> None:
        """Take what the program on a host says about itself."""
        running, status = self._hosts[host.target], self._states[host.target].status
        self._changed.set()
        if mark == remote.ENDED:
            running.saw_end = True
            return
        if mark == remote.READY:
            if status == "calling":
                self._turn(host.target, "ready")
            return
        running.has_agent = True
        if mark == remote.TAKEN_OVER:
            logger.info("%s runs an agent of this job already; following it", host)
            if self._interrupted or status == "leaving":
                running.send(self._interrupted or signal.SIGTERM)
        if status in ("calling", "starting"):
            self._turn(host.target, "running")
        self._met_at = [*(one for one in self._met_at if one != host.target), host.target]

    def _ended(self, host: HostSlots, exitcode: int) -> None:
        state, saw_end = self._states[host.target], self._hosts.pop(host.target).saw_end
        self._changed.set()
        # An agent that fails before the job does, by itself, does not end the job.
        if saw_end:
            self._result = exitcode if self._result is None else self._result
            return
        if self._result is not None or self._interrupted:
            return
        others = [target for target in self._met_at if target in self._hosts]
        self._met_at = others or self._met_at  # newcomers look for the job where it ran last
        if state.status == "leaving":
            del self._states[host.target]
            return
        state = failed(state, _now(), refused=exitcode == EXIT_USAGE)
        self._states[host.target] = state
        if all_refused(self._wanted, self._states):
            self._result = EXIT_USAGE
            return
        pause = state.retry_at - state.since
        logger.warning("%s: %s; next attempt in %.0f s", host, _meaning(exitcode), pause)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("%s", sentence)


def command_for(host: HostSlots) -> list[str]:
    """Return the command that starts the agent: over ssh, or directly on this machine."""
    program = [sys.executable, "-m", remote.__name__]
    if is_this_machine(host.address):
        return program
    shell = shlex.split(env.get(SSH_VARIABLE, _SSH))
    return [*shell, host.target, shlex.join(program)]


def is_this_machine(address: str) -> bool:
    return bool(loopback_addresses(address)) or address == socket.gethostname()


def handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the agents get, without those of this machine and login.

    >>> handed_on({"NCCL_DEBUG": "INFO", "HOME": "/root", "SSH_AUTH_SOCK": "/tmp/a"})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {name: value for name, value in environ.items() if not _OWN.fullmatch(name)}


def _meaning(exitcode: int) -> str:
    if exitcode == 255:
        return "ssh failed or lost its connection"
    if exitcode == EXIT_RENDEZVOUS_LOST:
        return "its agent lost the other hosts"
    if exitcode < 0:
        return f"ssh was killed by {signal.Signals(-exitcode).name}"
    if exitcode > EXIT_SIGNAL_BASE:
        return f"its agent left the job (exit code {exitcode})"
    if exitcode == 0:
        return "the ssh session ended without starting the agent (exit code 0)"
    return f"its agent failed or could not start (exit code {exitcode})"


async def _exit_of(
    process: asyncio.subprocess.Process, relays: Sequence[asyncio.Task[None]]
) -> int:
    """Wait for the end of a process and of its output.

    A master of ssh that stays in the background (`ControlPersist`) keeps the output open.
    """
    while process.returncode is None:
        _, pending = await asyncio.wait(relays, timeout=LOOK)
        if not pending:
            await process.wait()
    _, pending = await asyncio.wait(relays, timeout=LAST_OUTPUT_TIMEOUT)
    for relay in pending:
        relay.cancel()
    if pending:
        process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public way
    return process.returncode


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """A line, or as much of it as fits; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def _raise_errors(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def _now() -> float:
    return asyncio.get_running_loop().time()
