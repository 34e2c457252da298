"""Many agents in few processes, under orders: they join at once, one of them fails.

A process of its own has the agent that hosts the store, as in life, and so has every agent that is
to fail; the others share processes. Systems differ in nothing but the module their processes run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.crowds.channel import COUNT, GO, LEASE, MARK, Share
from benchmarks.harness.etcd import EtcdServer
from benchmarks.harness.processes import cpu_seconds
from benchmarks.harness.scenarios import Repetition, quiet_seconds

ROOT = Path(__file__).resolve().parent.parent.parent
#: Seconds until all processes have imported what they need.
START_PATIENCE = 120.0
#: Seconds until the others have gone on without one of them.
FAILURE_PATIENCE = 60.0
#: Seconds, at least, that a world is left alone before one of its members fails.
QUIET = 0.5


class CrowdFailed(Exception):
    """A process ended, or said something that cannot be."""


class CrowdLate(CrowdFailed):
    """It took too long."""


class Event(NamedTuple):
    """What a process told, and which; its end is an event as well."""

    process: int
    name: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class System:
    """A rendezvous, and the module that puts many of its agents into a process."""

    name: str
    module: str
    backend: str
    #: How it ran, in a sentence for the report.
    note: str
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def has_host(self) -> bool:
        """Whether the store lives with one of the agents."""
        return self.backend != "etcd"

    def endpoint(self) -> AbstractContextManager[str]:
        """Where the agents meet; what has to run there does."""
        if self.has_host:
            return contextlib.nullcontext(f"127.0.0.1:{_quiet_port()}")
        return EtcdServer()


EMBEDDED = System(
    "embedded",
    "benchmarks.crowds.ours",
    "c10d",
    f"torchelastic, embedded store, leases of {LEASE} s: agents are tasks, the first of them hosts "
    "the store",
)
ETCD = System(
    "etcd",
    "benchmarks.crowds.ours",
    "etcd",
    f"torchelastic at one real etcd, leases of {LEASE} s; etcd's settings are its own but for its "
    "data, which lie in memory",
)
TORCHRUN = System(
    "torchrun",
    "benchmarks.crowds.torchrun",
    "c10d",
    "torchrun's dynamic rendezvous over c10d: agents are threads, the first of them hosts the "
    "TCPStore; `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, time-outs too long to play a part, a "
    f"keep-alive every {LEASE} s",
    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)
SYSTEMS = (EMBEDDED, ETCD, TORCHRUN)


def _quiet_port() -> int:
    """A free port that the kernel gives to nobody by itself: thousands of connections ask it for
    one before the host has bound this."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def shares(
    system: System, endpoint: str, agents: int, processes: int, *, least: int, victims: int = 0
) -> list[Share]:
    """Who goes where: the host alone, those to fail alone, all others evenly."""
    crowded = agents - victims - system.has_host
    sizes = [crowded // processes + (index < crowded % processes) for index in range(processes)]
    job = f"crowd-{secrets.token_hex(4)}"

    def share(count: int, hosts: bool = False) -> Share:
        return Share(job, system.backend, endpoint, count, least, agents, hosts)

    return [
        *([share(1, hosts=True)] if system.has_host else []),
        *(share(size) for size in sizes if size),
        *(share(1) for _ in range(victims)),
    ]


class Crowd:
    """The processes of one job."""

    def __init__(self, system: System, members: Sequence[Share], errors: IO[bytes]) -> None:
        self._shares = members
        #: A file that takes the processes' standard error.
        self._errors = errors
        self._events: queue.Queue[Event] = queue.Queue()
        self._processes = [self._start(system, share) for share in members]
        self._readers = [
            threading.Thread(target=self._listen, args=(index,), name=f"crowd-{index}")
            for index in range(len(members))
        ]
        for reader in self._readers:
            reader.start()
        #: Those that have not been made to fail.
        self.present = list(range(len(members)))

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for reader in self._readers:
            reader.join()
        for process in self._processes:
            process.__exit__(None, None, None)  # waits for it, and closes its pipes

    def wait_ready(self) -> None:
        self._gather("ready", self.present, START_PATIENCE)

    def join(self, limit: float) -> Joined:
        """All join, the host first: from its first step until the last one has the world."""
        hosts = [index for index, share in enumerate(self._shares) if share.hosts]
        others = [index for index in self.present if index not in hosts]
        deadline = time.monotonic() + limit
        cpu = self._cpu_seconds()
        began = []
        for index in hosts:
            self._order([index], GO)
            began += self._gather("joining", [index], limit)
            self._gather("up", [index], limit)
        self._order(others, GO)
        began += self._gather("joining", others, limit)
        worlds = self._worlds(sum(share.agents for share in self._shares), deadline)
        return Joined(
            max(event.facts["at"] for event in worlds) - min(event.facts["at"] for event in began),
            self._cpu_seconds() - cpu,
            sum(event.facts.get("leases_lost", 0) for event in worlds),
        )

    def fail(self, victim: int) -> float:
        """SIGKILL to a process: from it until the last of the others has the next world."""
        process = self._processes[victim]
        killed = time.monotonic()
        process.kill()
        self.present.remove(victim)
        agents = sum(self._shares[index].agents for index in self.present)
        worlds = self._worlds(agents, killed + FAILURE_PATIENCE)
        return float(max(event.facts["at"] for event in worlds) - killed)

    def victims(self) -> list[int]:
        """The processes that are there to fail: the last ones, of one agent each."""
        return [
            index
            for index in self.present
            if self._shares[index].agents == 1 and not self._shares[index].hosts
        ]

    @contextlib.contextmanager
    def counting(self) -> Iterator[Callable[[], dict[str, float]]]:
        """Gives what tells the bytes that an ordinary member has sent and received within."""
        crowded = [index for index in self.present if self._shares[index].agents > 1]
        self._order(crowded, MARK)
        self._gather("marked", crowded, FAILURE_PATIENCE)

        def carried() -> dict[str, float]:
            self._order(crowded, COUNT)
            found = self._gather("carried", crowded, FAILURE_PATIENCE)
            members = sum(self._shares[index].agents for index in crowded)
            return {
                way: round(sum(event.facts[way] for event in found) / members, 1)
                for way in ("sent", "received")
            }

        yield carried

    def errors(self) -> str:
        """The end of what the processes wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]

    def _cpu_seconds(self) -> float:
        return sum(cpu_seconds(self._processes[index].pid) for index in self.present)

    def _start(self, system: System, share: Share) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", system.module, share.to_text()],
            cwd=ROOT,
            env={**os.environ, **system.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for us
        )

    def _listen(self, index: int) -> None:
        pipe = self._processes[index].stdout
        assert pipe is not None
        for line in pipe:
            facts = json.loads(line)
            self._events.put(Event(index, facts.pop("event"), facts))
        self._events.put(Event(index, "ended", {}))

    def _order(self, processes: Sequence[int], order: str) -> None:
        for index in processes:
            pipe = self._processes[index].stdin
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # its end is an event
                pipe.write(f"{order}\n".encode())
                pipe.flush()

    def _gather(self, name: str, processes: Sequence[int], seconds: float) -> list[Event]:
        """One event of this name from each."""
        return self._collect(
            processes, time.monotonic() + seconds, lambda event: event.name == name
        )

    def _worlds(self, size: int, deadline: float) -> list[Event]:
        """The world of this size as each process has it; every agent must have a rank of its own.

        Others that come before, while agents are still joining, are not it.
        """
        found = self._collect(
            self.present,
            deadline,
            lambda event: event.name == "world" and event.facts["size"] == size,
        )
        ranks = sorted(rank for event in found for rank in event.facts["ranks"])
        if len({event.facts["generation"] for event in found}) > 1 or ranks != list(range(size)):
            raise CrowdFailed(f"the agents have different worlds, or ranks: {ranks[:20]} ...")
        return found

    def _collect(
        self, processes: Sequence[int], deadline: float, wanted: Callable[[Event], bool]
    ) -> list[Event]:
        found: dict[int, Event] = {}
        while set(processes) - set(found):
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise CrowdLate from None
            if event.name == "ended" and event.process in self.present:
                last = self.errors().strip().splitlines()[-1:]
                raise CrowdFailed(f"a process ended: {' '.join(last)}")
            if event.process in processes and wanted(event):
                found[event.process] = event
        return list(found.values())


class Joined(NamedTuple):
    """What it took all agents to have the first world."""

    seconds: float
    #: Processor time of all their processes; etcd's own is not among it.
    cpu: float
    leases_lost: int


@contextlib.contextmanager
def ready(
    system: System, agents: int, processes: int, *, least: int, victims: int = 0
) -> Iterator[Crowd]:
    """A crowd that waits for its first order."""
    with system.endpoint() as endpoint, tempfile.TemporaryFile() as errors:
        members = shares(system, endpoint, agents, processes, least=least, victims=victims)
        with Crowd(system, members, errors) as crowd:
            crowd.wait_ready()
            yield crowd


def measure_join(system: System, agents: int, processes: int, limit: float) -> Repetition:
    """Everybody joins a job of exactly so many."""
    with ready(system, agents, processes, least=agents) as crowd:
        try:
            joined = crowd.join(limit)
        except CrowdFailed as failure:
            return _missed(failure, limit, crowd)
        details = {"cpu": round(joined.cpu, 2), "leases_lost": joined.leases_lost}
        return Repetition(joined.seconds, details=details)


def measure_failures(
    system: System, agents: int, processes: int, repetitions: int, limit: float
) -> Iterator[Repetition]:
    """One member after the other fails; there are `agents` of them before the last one does."""
    everybody = agents + repetitions - 1
    with ready(system, everybody, processes, least=1, victims=repetitions) as crowd:
        try:
            crowd.join(limit)
        except CrowdFailed as failure:
            yield _missed(failure, limit, crowd)
            return
        for number, victim in enumerate(crowd.victims()):
            time.sleep(quiet_seconds(number, QUIET))
            try:
                with crowd.counting() as carried:
                    seconds = crowd.fail(victim)
                    yield Repetition(seconds, details=carried())
            except CrowdFailed as failure:
                yield _missed(failure, FAILURE_PATIENCE, crowd)
                return


def _missed(failure: CrowdFailed, limit: float, crowd: Crowd) -> Repetition:
    if isinstance(failure, CrowdLate):
        late = f"not finished after {limit:g} s"
        return Repetition(None, late, details={"limit": limit}, output=crowd.errors())
    return Repetition(None, str(failure), output=crowd.errors())
