"""A seeded run of kills, freezes, joins and leaves: whatever happens, the laws hold.

The node that hosts the rendezvous is left alone; its workers are not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.process.jobs import Job, Node, alive
from tests.process.test_train import start, stepped, training
from tests.support import SOAK, poll_for

FAULTS = 7 if SOAK == 1 else 14
#: `SOAK=5` is 500 kills, about ten minutes.
KILLS = 100 * SOAK
#: The kills after which an agent has everything that it keeps.
WARM_UP = 20
#: KiB of the last 4,096 changes, which the store keeps for its watchers.
HISTORY = 8192
#: Threads for calls that wait, which asyncio starts when some come at once, and keeps.
AT_ONCE = 2


class Chaos:
    """Does something to the job, and waits until it trains again."""

    def __init__(self, made: Job, seed: int) -> None:
        self.job = made
        self.random = random.Random(seed)
        self.nodes: list[Node] = []
        self.done: list[str] = []

    def strike(self) -> None:
        choices = [self.kill_worker, self.kill_worker, self.freeze_worker]
        if len(self.nodes) > 1:
            choices += [self.kill_node, self.leave, self.kill_worker_twice]
        if len(self.nodes) < 3:
            choices += [self.join, self.join]
        chosen = self.random.choice(choices)
        self.done.append(chosen.__name__)
        before = self.last_step()
        chosen()
        poll_for(
            lambda: self.last_step() > before + 3,
            what=f"steps after {self.done}",
            timeout=60,
        )

    def last_step(self) -> int:
        return max((line["step"] for line in self.job.lines(event="step")), default=-1)

    def workers(self) -> list[int]:
        """The pids of those who trained last."""
        lines = self.job.lines(event="step")
        last = max(line["generation"] for line in lines)
        return sorted({line["pid"] for line in lines if line["generation"] == last})

    def kill_worker(self) -> None:
        time.sleep(self.random.random() * 0.05)  # anywhere in a step
        self.send(signal.SIGKILL)

    def kill_worker_twice(self) -> None:
        """The second one while the others recover from the first."""
        self.kill_worker()
        time.sleep(self.random.random() * 0.05)
        self.send(signal.SIGKILL)

    def freeze_worker(self) -> None:
        self.send(signal.SIGSTOP)

    def send(self, signum: int) -> None:
        living = [pid for pid in self.workers() if alive(pid)]
        if living:
            os.kill(self.random.choice(living), signum)

    def kill_node(self) -> None:
        node = self.nodes.pop(self.random.randrange(1, len(self.nodes)))
        node.kill()

    def leave(self) -> None:
        node = self.nodes.pop(self.random.randrange(1, len(self.nodes)))
        node.process.terminate()
        assert node.wait() == 143

    def join(self) -> None:
        node = start(self.job)
        poll_for(lambda: node.events("joined"), what="the node joins")
        self.nodes.append(node)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 1 + SOAK))
def test_the_laws_hold_under_any_faults(tmp_path, seed):
    flags = "--nnodes=1:3 --nproc-per-node=2 --progress-timeout=1 --settle=0.2"
    with training(tmp_path, flags, steps=1000000, slow=0.01) as made:
        chaos = Chaos(made, seed)
        chaos.join()
        poll_for(lambda: stepped(made, 3), what="the first steps", timeout=60)
        for _ in range(FAULTS):
            chaos.strike()
            assert chaos.nodes[0].process.poll() is None, made.said()
        check_laws(made)
        chaos.nodes[0].process.terminate()
        assert chaos.nodes[0].wait() == 143


def check_laws(made: Job) -> None:
    lines = sorted(made.lines(event="step"), key=lambda line: line["at"])
    numbers = [line["generation"] for line in lines]
    assert numbers == sorted(numbers), "two worlds made progress at once"
    worlds = {
        number: [line for line in lines if line["generation"] == number]
        for number in sorted(set(numbers))
    }
    for world in worlds.values():
        by_step = defaultdict(set)
        for line in world:
            by_step[line["step"]].add(line["hash"])
        assert all(len(hashes) == 1 for hashes in by_step.values()), "ranks differ"
        done = {(line["rank"], line["step"]) for line in world}
        assert len(done) == len(world), "a step was committed twice by one rank in one world"
    for before, after in pairwise(worlds.values()):
        base = min(line["step"] for line in after)
        survivors = {line["pid"] for line in after}
        kept = [line["step"] for line in before if line["pid"] in survivors]
        assert max(kept, default=-1) < base, "a step that a survivor had committed was lost"
        assert base <= max(line["step"] for line in before) + 1, "a step was skipped"


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    #: Its share of the memory, in KiB.
    pss: int

    @classmethod
    def by(cls, pid: int) -> Held:
        process = Path(f"/proc/{pid}")
        rollup = (process / "smaps_rollup").read_text()
        return cls(
            descriptors=len(os.listdir(process / "fd")),
            threads=len(os.listdir(process / "task")),
            pss=int(rollup.partition("\nPss:")[2].split()[0]),
        )

    def has_not_grown_since(self, before: Held) -> bool:
        return (
            self.descriptors <= before.descriptors
            and self.threads <= before.threads + AT_ONCE
            and self.pss <= before.pss + HISTORY
        )


def in_newest_world(made: Job) -> tuple[int, list[int]]:
    """The newest generation, and the pids of the living workers that have stepped in it."""
    found = defaultdict(list)
    for path in made._lines.iterdir():
        if alive(int(path.stem)):
            steps = [line for line in path.read_text().split("\n")[:-1] if '"step",' in line]
            if steps:
                last = json.loads(steps[-1])
                found[last["generation"]].append(last["pid"])
    return max(((number, sorted(pids)) for number, pids in found.items()), default=(-1, []))


@pytest.mark.slow
@pytest.mark.timeout(300 * SOAK)
def test_killed_workers_leave_no_descriptors_threads_or_memory_with_their_agents(tmp_path):
    """The workers of two agents are killed and replaced a hundred times: a minute or two."""
    with training(tmp_path, "--nnodes=2 --nproc-per-node=1", steps=1000000, slow=0.02) as made:
        agents = [start(made).agent_pid, start(made).agent_pid]
        generation, workers = -1, []
        before: list[Held] = []
        for number in range(KILLS + 1):

            def replaced(old: int = generation) -> tuple[int, list[int]] | None:
                new, stepping = in_newest_world(made)
                return (new, stepping) if new > old and len(stepping) == 2 else None

            what = f"two workers after {number} kills"
            generation, workers = poll_for(replaced, what=what, timeout=60)
            if number == WARM_UP:
                before = [Held.by(pid) for pid in agents]
            os.kill(workers[number % 2], signal.SIGKILL)
        for agent, then in zip(agents, before, strict=True):

            def is_flat(agent: int = agent, then: Held = then) -> bool:
                return Held.by(agent).has_not_grown_since(then)

            poll_for(is_flat, what=f"{Held.by(agent)}, not more than {then}", timeout=10)
