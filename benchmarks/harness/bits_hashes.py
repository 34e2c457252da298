"""One run of `bits.py`: a job, what is done to it, and its hashes beside those of one worker."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import processes
from benchmarks.harness.bits_plans import MOST, REPLICA, SHARDED, Fault, Plan
from benchmarks.harness.etcd import EtcdServer
from benchmarks.harness.job import Job, JobFailed, Node
from benchmarks.harness.launchers import OURS
from benchmarks.harness.step_logs import Tail

SCRIPT = "bits_train.py"
#: Steps of a run at most, and of a reference.
STEPS = 300
#: Seconds in which a job continues after a fault, and ends; and in which nodes that were held out
#: or are still starting are waited for.
PATIENCE, TO_JOIN = 60.0, 25.0
LEASE = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with hashes that are equal, or not."""

    seed: int
    note: str
    compared: int = 0
    sizes: tuple[int, ...] = ()
    story: list[str] = field(default_factory=list)
    seconds: float = 0.0


class EndedEarly(Exception):
    """The job has taken all its steps."""


class Lines:
    """What the workers of a job have written."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._tails = directory, {}  # type: ignore[var-annotated]
        self.all: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        for path in self._directory.glob("*.jsonl"):
            if path not in self._tails:
                self._tails[path] = Tail(path)
        for tail in self._tails.values():
            self.all += [json.loads(line) for line in tail.new_lines()]
        return self.all

    def hashes(self) -> list[dict[str, Any]]:
        return [one for one in self.read() if one["event"] == "hash"]


def keys_of(plan: Plan) -> list[str]:
    named = {"mode": plan.mode, "model": plan.model, "count": plan.count, "steps": STEPS}
    return [f"{name}={value}" for name, value in {**named, **plan.keys}.items()]


def reference(model: str, count: int, *, steps: int = STEPS, **keys: object) -> list[str]:
    """The hash of each step of an undisturbed run of one worker or replica, or of as many workers
    as are asked for."""
    workers = int(str(keys.pop("workers", REPLICA if model == SHARDED else 1)))
    words = [f"{name}={value}" for name, value in keys.items()]
    words += [f"model={model}", f"count={count}", f"steps={steps}"]
    with Job(OURS, SCRIPT, words, workers=workers, elastic=False) as job:
        node, lines = job.start_node(), Lines(job.directory / "logs")
        if node.process.wait(300):
            raise JobFailed(job.output())
        found = {line["step"]: line["hash"] for line in lines.hashes()}
    return [found[step] for step in sorted(found)]


class Run:
    """A job to which things happen."""

    def __init__(self, plan: Plan, job: Job, directory: Path) -> None:
        self.plan, self.job = plan, job
        self.lines = Lines(job.directory / "logs")
        self.nodes: list[tuple[Node, int]] = []
        #: Nodes that leave.
        self.leaving: list[Node] = []
        self.story: list[str] = []
        self._began = time.monotonic()
        self._rng = random.Random(plan.seed)
        #: Frozen processes, and when they wake.
        self._frozen: list[tuple[float, list[int]]] = []

    def start(self) -> None:
        for number, workers in enumerate(self.plan.nodes):
            self._add(workers)
            if not number and len(self.plan.nodes) > 1:
                time.sleep(0.3)
        self._wait_for(lambda: self._newest() >= 1, "the first steps")

    def _add(self, workers: int) -> None:
        self.nodes.append((self.job.start_node(workers), workers))

    @property
    def workers(self) -> int:
        return sum(workers for _, workers in self.nodes)

    def tell(self, what: str) -> None:
        world = self._world()
        where = f"step {self._newest()}, {len(world)} workers"
        self.story.append(f"{time.monotonic() - self._began:5.1f} s  {what} (at {where})")

    # --- where it is -----------------------------------------------------------------------------

    def _world(self) -> dict[int, dict[str, Any]]:
        """The last line of each rank of the newest generation."""
        lines = self.lines.hashes()
        newest = max((one["generation"] for one in lines), default=-1)
        return {one["rank"]: one for one in lines if one["generation"] == newest}

    def _newest(self) -> int:
        """The number of steps that all ranks of the newest generation have committed."""
        world = self._world()
        if not world or len(world) < next(iter(world.values()))["size"]:
            return -1
        return min(one["step"] for one in world.values())

    def _wait_for(self, probe: Any, what: str, seconds: float = PATIENCE) -> None:
        if not self._is_so(probe, seconds):
            raise JobFailed(f"not within {seconds:g} s: {what}")

    def _is_so(self, probe: Any, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not probe():
            self._thaw()
            self._check()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _check(self) -> None:
        for node, _ in self.nodes:
            if node.process.poll() is not None:
                if self._newest() == STEPS:
                    raise EndedEarly
                raise JobFailed(f"a node ended with {node.process.poll()}")

    def _continued(self, generation: int, step: int) -> bool:
        """Whether the job has taken two more steps, by any world."""
        world = self._world()
        newest = next(iter(world.values()))["generation"] if world else -1
        if newest > generation:
            return self._newest() >= 1 and self._steps_of(newest) >= 2
        return self._newest() >= step + 2

    def _steps_of(self, generation: int) -> int:
        every = self.lines.hashes()
        found = {one["step"] for one in every if one["generation"] == generation}
        return max(found) - min(found) if found else 0

    # --- what happens ----------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        time.sleep(fault.delay)
        self._thaw()
        world = self._world()
        generation = next(iter(world.values()))["generation"] if world else -1
        step = self._newest()
        if not getattr(self, "_" + fault.kind.replace("-", "_"))(fault, world):
            return
        self.tell(f"{fault.kind} {fault.target}")
        if not fault.is_hasty:
            self._wait_for(lambda: self._continued(generation, step), f"a step after {fault.kind}")

    def _pids(self, fault: Fault, world: Mapping[int, dict[str, Any]], count: int) -> list[int]:
        """Workers that live, in different places of the world."""
        alive = [one["pid"] for one in world.values() if processes.stat_fields(one["pid"])]
        count = min(count, len(alive))
        return [alive[(fault.target + number) % len(alive)] for number in range(count)]

    def _kill(self, fault: Fault, world: Mapping[int, dict[str, Any]], count: int = 1) -> bool:
        processes.kill(pids := self._pids(fault, world, count))
        return bool(pids)

    def _kill_two(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> bool:
        return self._kill(fault, world, 2)

    def _freeze(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> bool:
        pids = self._pids(fault, world, 1)
        processes.send(pids, signal.SIGSTOP)
        self._frozen.append((time.monotonic() + fault.freeze, pids))
        return bool(pids)

    def _freeze_until_replaced(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> bool:
        pids = self._pids(fault, world, 1)
        processes.send(pids, signal.SIGSTOP)
        self._frozen.append((time.monotonic() + 20.0, pids))
        return bool(pids)

    def _victim(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> int | None:
        """A node that the others can do without: most of those who trained last are left."""
        if len(world) < self.workers or len(self.nodes) < 2 or self._newest() < 0:
            return None
        decided = self.plan.backend == "etcd" or self.plan.has_witness
        if len(self.nodes) == 2 and not decided:
            return None
        return fault.target % len(self.nodes)

    def _kill_node(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> bool:
        number = self._victim(fault, world)
        if number is None:
            return False
        self.nodes.pop(number)[0].kill()
        return True

    def _freeze_node(
        self, fault: Fault, world: Mapping[int, dict[str, Any]], seconds: float = 0.0
    ) -> bool:
        number = self._victim(fault, world)
        if number is None:
            return False
        node = self.nodes[number][0]
        pids = [node.process.pid, *processes.descendants(node.process.pid)]
        node.freeze()
        self._frozen.append((time.monotonic() + (seconds or fault.freeze), pids))
        return True

    def _freeze_node_for_long(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> bool:
        return self._freeze_node(fault, world, LEASE + 2 * fault.freeze)

    def _leave(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> bool:
        if len(self.nodes) < 2 or len(world) < self.workers:
            return False
        node, _ = self.nodes.pop(fault.target % len(self.nodes))
        node.process.send_signal(signal.SIGTERM)
        self.leaving.append(node)
        return True

    def _join(self, fault: Fault, world: Mapping[int, dict[str, Any]]) -> bool:
        workers = min(self.plan.joining, MOST - self.workers)
        if workers < 1 or len(self.nodes) > 3:
            return False
        self._add(workers)
        return True

    def _thaw(self, everything: bool = False) -> None:
        now = time.monotonic()
        due = [one for one in self._frozen if everything or one[0] <= now]
        self._frozen = [one for one in self._frozen if one not in due]
        for _, pids in due:
            processes.send(reversed(pids), signal.SIGCONT)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Let all nodes train together, and end; return whether they did so."""
        is_whole = self._is_so(
            lambda: len(self._world()) == self.workers and not self._frozen and self._newest() > 0,
            TO_JOIN,
        )
        self._is_so(lambda: not self._frozen, 25.0)
        generation = next(iter(self._world().values()))["generation"]
        self._wait_for(
            lambda: self._continued(generation, self._newest()) or self._steps_of(generation) >= 2,
            "the last steps",
        )
        newest = max(one["step"] for one in self.lines.hashes())
        stop = self.job.directory / "logs" / "STOP"
        stop.with_suffix(".part").write_text(str(newest + 10))
        stop.with_suffix(".part").rename(stop)
        deadline = time.monotonic() + PATIENCE
        for node in [*(node for node, _ in self.nodes), *self.leaving]:
            try:
                code = node.process.wait(max(0.1, deadline - time.monotonic()))
            except Exception:
                raise JobFailed("a node did not end") from None
            if code not in ((0, 143) if node in self.leaving else (0,)):
                raise JobFailed(f"a node ended with {code}")
        return is_whole


def perform(plan: Plan, expected: list[str], keep: Path | None = None) -> Outcome:
    """Carry out a plan; the files of a run that failed are kept."""
    began = time.monotonic()
    with ExitStack() as stack:
        flags = ["--lease", str(LEASE)]
        flags += ["--rdzv-backend", plan.backend] if plan.backend != "c10d" else []
        flags += ["--progress-timeout", str(plan.limit)] if plan.limit else []
        environment = {"TORCHELASTIC_FAULTS": plan.places} if plan.places else {}
        launcher = replace(OURS, flags=tuple(flags), environment=environment)
        job = stack.enter_context(Job(launcher, SCRIPT, keys_of(plan), nodes="1:4"))
        if plan.has_witness and plan.backend == "c10d":
            (job.directory / "witness").mkdir()
            job.launcher = replace(
                launcher, flags=(*flags, "--witness", str(job.directory / "witness"))
            )
        if plan.backend == "etcd":
            job.endpoint = stack.enter_context(EtcdServer())
        run = Run(plan, job, job.directory)
        note = ""
        try:
            run.start()
            for fault in plan.faults:
                run.strike(fault)
            whole = run.finish()
        except EndedEarly:
            whole = True
            run.tell("all steps are taken")
        except JobFailed as failure:
            note, whole = str(failure), False
        finally:
            run._thaw(everything=True)
        lines = run.lines.hashes()
        wrong = [one for one in lines if expected[one["step"]] != one["hash"]]
        if wrong:
            first = min(wrong, key=lambda one: one["t"])
            place = f"rank {first['rank']} of {first['size']}, generation {first['generation']}"
            place = f"first at step {first['step']}, {place}"
            note = f"{len(wrong)} of {len(lines)} hashes differ ({place}); {note}"
        if note and keep is not None:
            shutil.copytree(
                job.directory,
                keep / f"seed-{plan.seed}",
                dirs_exist_ok=True,
                ignore=lambda folder, names: [one for one in names if _is_special(folder, one)],
            )
        story = run.story if whole else [*run.story, "not all nodes came together"]
        sizes = tuple(sorted({one["size"] for one in lines}))
        seconds = time.monotonic() - began
        return Outcome(plan.seed, note, len(lines), sizes, story, round(seconds, 1))


def _is_special(folder: str, name: str) -> bool:
    path = Path(folder, name)
    return not path.is_file() and not path.is_dir()


def control() -> dict[str, dict[str, str]]:
    """What plain DDP ends with, by model and number of workers: without any fault."""
    keys = {"mode": "ddp", "steps": 20}
    return {
        model: {str(w): reference(model, 8, workers=w, **keys)[-1] for w in (1, 2, 4)}
        for model in ("transformer", "lstm")
    }
