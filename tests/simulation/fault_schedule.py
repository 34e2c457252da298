"""Schedules of faults for a simulated job: made from a seed, shown as text, made shorter.

kill, restart     an agent and its workers end; restart: another agent starts on the machine
freeze, thaw      all that runs on a machine
stall             the agent of a machine alone is frozen: its workers run on
worker            the worker of a machine is killed
cut               nothing gets from some machines to others: {a b} {c d e}, both ways or one
mend              all ways are clear again, and none is slow
slow              messages from some machines to others take their time
join, leave       a machine that was not there before; an agent is asked to go
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torchelastic.config import LaunchConfig

MACHINES = "abcde"
NEWCOMERS = "fg"
#: Seconds of the first fault and of the last, and when everything is healed.
FIRST_AT, LAST_AT, HEALED_AT = 4.0, 36.0, 40.0
#: Seconds of a simulated job, and of a lease in it.
END, LEASE = 60.0, LaunchConfig.lease
#: Seconds for one round without obstacles: an election, the settle time, starts of workers, and a
#: step.
ROUND = 7.0


class ScheduledFault(NamedTuple):
    at: float
    kind: str
    #: The machines that it affects, and those on the other side of a cut.
    machines: str = ""
    others: str = ""
    both_ways: bool = True
    seconds: float = 0.0

    def __str__(self) -> str:
        what = f"{self.at:7.3f} s  {self.kind}"
        if self.machines:
            what += f" {' '.join(self.machines)}"
        if self.others:
            what += f" {'|' if self.both_ways else '->'} {' '.join(self.others)}"
        return what + (f" by {self.seconds:g} s" if self.seconds else "")


class Schedule(NamedTuple):
    """One job, and the faults it meets."""

    seed: int
    #: Whether its workers call `torchelastic.train`.
    resident: bool
    machines: str
    min_nodes: int
    max_nodes: int
    #: Whether a restarted agent is the same voter, with its last agent's file.
    remembers: bool
    #: The number of training steps; a large one: it does not end.
    steps: int
    faults: tuple[ScheduledFault, ...]
    #: Workers on each machine, and the number of workers in a replica; 0: it is not sharded.
    workers: int = 1
    replica: int = 0
    #: Whether the store is an etcd, which every machine always reaches.
    etcd: bool = False
    #: The machines that may start the job; empty: drawn from the seed. With etcd, any.
    endpoints: str = ""

    @property
    def spanned(self) -> int:
        """The number of machines that a replica spans."""
        return max(self.replica // self.workers, 1)

    @property
    def nodes_needed(self) -> int:
        """The least number of machines that can train: whole replicas."""
        return -(-self.min_nodes // self.spanned) * self.spanned

    def __str__(self) -> str:
        kind = "train" if self.resident else "script"
        head = f"seed {self.seed}: {kind}, {len(self.machines)} machines, "
        head += f"--nnodes {self.min_nodes}:{self.max_nodes}"
        if self.etcd:
            head += ", etcd"
        if self.replica:
            head += f", {self.workers} workers each, replicas of {self.replica}"
        if self.remembers:
            head += ", agents resume"
        if self.steps < ENDLESS:
            head += f", {self.steps} steps"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


ENDLESS = 1 << 20
KINDS = {
    "kill": 3,
    "restart": 4,
    "freeze": 3,
    "thaw": 2,
    "worker": 5,
    "cut": 5,
    "mend": 4,
    "slow": 2,
    "join": 1,
    "leave": 2,
}


def made_from(seed: int, faults: int = 10, machines: int | None = None) -> Schedule:
    """Make the schedule of a seed."""
    chance = random.Random(seed)
    count = machines or chance.choice((2, 3, 3, 4, 4, 5, 5, 5))
    there = MACHINES[:count]
    min_nodes = chance.choice((1, 1, 2, (count + 1) // 2))
    times = _times(chance, faults)
    return Schedule(
        seed=seed,
        resident=chance.random() < 0.5,
        machines=there,
        min_nodes=min_nodes,
        max_nodes=count + 2 if chance.random() < 0.8 else count,
        steps=ENDLESS if chance.random() < 0.9 else chance.randint(5, 80),
        faults=tuple(_fault(chance, at, there) for at in times),
        remembers=chance.random() < 0.5,
    )


#: Workers on each machine, and in a replica: on one machine, or on two.
REPLICAS = ((2, 2), (4, 2), (1, 2), (2, 4))


def sharded_from(seed: int, faults: int = 10, machines: int | None = None) -> Schedule:
    """Make the schedule of a seed for a sharded model."""
    chance = random.Random(f"replicas of {seed}")
    made = made_from(seed, faults, machines or chance.choice((3, 4, 4, 5, 5)))
    workers, replica = chance.choice(REPLICAS)
    made = made._replace(resident=True, workers=workers, replica=replica)
    # As many machines as are needed are there at the end, and --nnodes allows them.
    most = len(made.machines) // made.spanned * made.spanned
    return made._replace(min_nodes=min(made.min_nodes, most))


#: The kinds of faults of a job with etcd: mostly cuts between its machines. A flap is a cut that
#: soon heals.
PEER_KINDS = {**KINDS, "cut": 9, "flap": 6, "mend": 7, "freeze": 1, "stall": 1, "join": 2}


def peers_from(seed: int, faults: int = 10, machines: int | None = None) -> Schedule:
    """Make the schedule of a seed for a job with etcd, whose machines are cut from each other."""
    chance = random.Random(f"peers of {seed}")
    made = made_from(seed, faults, machines or chance.choice((2, 3, 4, 5, 5, 5)))
    chosen: list[ScheduledFault] = []
    for at in _times(chance, faults):
        fault = _fault(chance, at, made.machines, PEER_KINDS)
        if fault.kind == "flap":
            healed = round(at + chance.choice((0.1, 0.7, 2.0, 4.0)), 3)
            chosen += [fault._replace(kind="cut"), ScheduledFault(healed, "mend")]
        else:
            chosen.append(fault)
    # Every agent is a new node: with etcd, none has a vote to remember.
    return made._replace(etcd=True, remembers=False, faults=tuple(sorted(chosen)))


def _times(chance: random.Random, count: int) -> list[float]:
    """The times of faults: single, or in bursts, so that rare combinations happen within a
    lease."""
    times: list[float] = []
    while len(times) < count:
        at = chance.uniform(FIRST_AT, LAST_AT)
        times.append(at)
        while len(times) < count and chance.random() < 0.5:
            at = min(at + chance.choice((0.0, 0.01, 0.05, 0.3, 1.0, 3.2)), LAST_AT)
            times.append(at)
    return [round(at, 3) for at in sorted(times)]


def _fault(
    chance: random.Random, at: float, machines: str, kinds: Mapping[str, int] = KINDS
) -> ScheduledFault:
    kind = chance.choices([*kinds], [*kinds.values()])[0]
    if kind in ("cut", "flap", "slow"):
        return _between(chance, at, kind, machines)
    if kind == "mend":
        return ScheduledFault(at, kind)
    if kind == "join":
        return ScheduledFault(at, kind, chance.choice(NEWCOMERS))
    return ScheduledFault(at, kind, chance.choice(machines))


def _between(chance: random.Random, at: float, kind: str, machines: str) -> ScheduledFault:
    """Two sides: all machines, or a few of them."""
    every = list(machines)
    chance.shuffle(every)
    if chance.random() < 0.3:
        every = every[:2]
    size = chance.randint(1, len(every) - 1)
    sides = "".join(sorted(every[:size])), "".join(sorted(every[size:]))
    return ScheduledFault(
        at,
        kind,
        *sides,
        both_ways=kind == "slow" or chance.random() < 0.7,
        seconds=chance.choice((0.02, 0.1, 0.2)) if kind == "slow" else 0.0,
    )


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A shorter schedule that still fails: with as few faults as possible, then with fewer
    machines."""
    size = max(len(schedule.faults) // 2, 1)
    while size:
        begin = 0
        while begin < len(schedule.faults):
            faults = schedule.faults
            fewer = schedule._replace(faults=faults[:begin] + faults[begin + size :])
            if fails(fewer):
                schedule = fewer
            else:
                begin += size
        size //= 2
    for simpler in _simpler(schedule):
        if fails(simpler(schedule)):
            schedule = simpler(schedule)
    return schedule


def _simpler(schedule: Schedule) -> Sequence[Callable[[Schedule], Schedule]]:
    """Ways to make a schedule easier to read; each is tried once."""
    ways: list[Callable[[Schedule], Schedule]] = [
        lambda it: it._replace(steps=ENDLESS),
        lambda it: it._replace(min_nodes=1),
    ]

    def without(machine: str) -> Callable[[Schedule], Schedule]:
        return lambda it: it._replace(machines=it.machines.replace(machine, ""))

    used = {machine for fault in schedule.faults for machine in fault.machines + fault.others}
    for machine in reversed(schedule.machines[1:]):
        if machine not in used:
            ways.append(without(machine))
    return ways
