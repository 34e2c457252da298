"""In-process workers under a real agent: killed at every point of a step, frozen, unfit, joined."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.jobs import HERE, Job, alive, child_running, job
from tests.support import SOAK, poll_for

PATIENT = HERE / "patient.py"

#: Several workers import torch at the same time, and are replaced, on however few cores.
pytestmark = pytest.mark.timeout(300)

#: Every place of a step, and of the way into a world.
PLACES = (
    "step.begin",
    "collective.before",
    "collective.launched",
    "collective.after",
    "optimizer.before",
    "optimizer.inside",
    "optimizer.after",
    "step.end",
    "sync.begin",
    "sync.end",
    "group.build",
)


@contextmanager
def training(tmp_path, flags="", monkeypatch=None, faults="", **keys):
    if faults:
        monkeypatch.setenv("TORCHELASTIC_FAULTS", faults)
    with job(tmp_path, flags, HERE / "resident.py", **keys) as made:
        yield made
    if faults:
        monkeypatch.delenv("TORCHELASTIC_FAULTS")


def bits(made: Job) -> dict[int, set[str]]:
    """The parameters after each step, on whatever rank and however often."""
    found = defaultdict(set)
    for line in made.steps():
        found[line["step"]].add(line["hash"])
    return dict(found)


def stepped(made: Job, step: int, **wanted) -> bool:
    return bool([line for line in made.steps(**wanted) if line["step"] >= step])


def final(made: Job, workers: int) -> tuple[str, float, int]:
    done = made.lines(event="done")
    assert len(done) == workers, made.said()
    [end] = {(line["hash"], line["lr"], line["step"]) for line in done}
    return end


def pids(made: Job, **wanted) -> set[int]:
    return {line["pid"] for line in made.steps(**wanted)}


def killed_at(places: tuple[str, ...], ranks: tuple[int, int]) -> str:
    """One kill per generation, each at another place, of one rank and the other in turn."""
    return ";".join(
        f"kill@rank={ranks[number % 2]},place={place},generation={number}"
        + (f",step={2 + number}" if place.startswith(("step", "collective", "optimizer")) else "")
        for number, place in enumerate(places)
    )


#: The first generation after the kills, and what is done to rank 1 in it and in the next ones.
CALM = len(PLACES)
FROZEN = (f"stop@rank=1,step=13,place=collective.before,generation={CALM}",)
STUCK = (
    f"stop@rank=1,place=group.build,generation={CALM}",
    f"stop@rank=1,place=sync.begin,generation={CALM + 1}",
    f"sleep=600@rank=1,step=13,place=step.begin,generation={CALM + 2}",
)


@pytest.mark.parametrize(
    ("ranks", "stopped"),
    [
        pytest.param((0, 2), FROZEN, id="frozen"),
        pytest.param((2, 0), STUCK, id="stuck", marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere_and_replaced_the_result_is_the_same_to_the_bit(
    tmp_path, monkeypatch, ranks, stopped
):
    """A dozen generations, each ended by a fault; the world waits for the replacement.

    A kill at every place of a step and of the way into a world; freezes and a hang, which are told
    with their stack; an error, which is tried again by the same processes; and data that ends early
    on one rank. Two nodes import torch: the second job is undisturbed.
    """
    keys = {"steps": 20, "ends": "1:16"}
    faults = ";".join([killed_at(PLACES, ranks), *stopped])
    flags = "--nnodes=1 --nproc-per-node=3 --world-sizes=3 --progress-timeout=5"
    if stopped is STUCK:
        monkeypatch.setenv("PATH", str(tmp_path))  # no py-spy
    with training(tmp_path / "killed", flags, monkeypatch, faults, **keys) as made:
        made.program = [str(PATIENT)]
        made.order("raise-once a flaky disk", generation=15, rank=1)
        node = made.start()
        assert node.wait(120) == 0, made.said()
        ended = [event for event in node.events("worker-exited") if event["exitcode"] == -9]
        # On a busy machine more: who is not free soon after its world is over is killed, too.
        assert len(ended) >= len(PLACES) + len(stopped), made.said()
        # And not replaced any more if that was the last one.
        assert len(made.lines(event="start")) <= 3 + len(ended), "replaced for an error"
        assert "a flaky disk" in node.stderr
        killed = node.events("worker-killed")
        check_stopped([one for one in killed if "not free" not in one["reason"]], stopped)
        found, end = bits(made), final(made, 3)
    assert all(len(hashes) == 1 for hashes in found.values()), found
    assert end[2] == 16, "the data of rank 1 ends there"
    with training(tmp_path / "undisturbed", "--nnodes=1 --nproc-per-node=3", **keys) as made:
        assert made.start().wait(60) == 0, made.said()
        assert (found, end) == (bits(made), final(made, 3))


def check_stopped(killed: list[dict], stopped: tuple[str, ...]) -> None:
    assert [event["rank"] for event in killed] == [1] * len(stopped)
    reasons, stack = [event["reason"] for event in killed], killed[-1]["stack"]
    if stopped is FROZEN:
        assert "frozen" in reasons[0]
        assert ("train_step" if shutil.which("py-spy") else "it is frozen") in stack
        return
    for number, reason in enumerate(reasons[:2]):
        assert f"on the way into generation {CALM + number}" in reason
        assert "(frozen)" in reason
    assert reasons[2].startswith("no progress for ")
    assert "(faults.py, line " in reasons[2]
    assert "faults.py" in stack
    assert "_take_steps" in stack


def test_workers_and_nodes_come_and_go_until_an_error_stays(tmp_path):
    """One job: a killed worker is replaced; a node joins, and leaves on a preemption notice, at
    boundaries of steps; a node is lost; an error that comes back ends the job and is shown.

    Three nodes import torch, one after the other."""
    flags = "--nnodes=1:2 --nproc-per-node=2 --settle=0.2"
    with training(tmp_path, flags, steps=100000, slow=0.1) as made:
        first = made.start()
        poll_for(lambda: stepped(made, 5), what="steps")
        victim = made.steps(rank=1)[0]["pid"]
        survivors = pids(made) - {victim}
        os.kill(victim, signal.SIGKILL)
        # The replacement may be ready before the survivor is out of the step that it sleeps in.
        later = poll_for(
            lambda: [each for each in (1, 2) if stepped(made, 0, size=2, generation=each)],
            what="a step with a replacement",
        )[0]
        poll_for(lambda: survivors < pids(made, generation=later), what="the survivor in it")
        survivors = pids(made, generation=later)

        second = made.start(f"--preemption=file={tmp_path}/notice")
        made.wait_steps(5, after=later, size=4)
        assert survivors < pids(made, size=4), "the same processes are among them"
        before = made.newest()
        (tmp_path / "notice").write_text("40 rack 7 is moved")
        assert second.wait() == 143
        assert "rack 7 is moved: leaving the job; the workers have 38 s" in second.stderr
        [left] = first.events("node-leaving")
        assert left["reason"] == "rack 7 is moved"
        made.wait_steps(5, after=before, size=2)
        entered = {(line["step"], line["rank"]) for line in made.lines(event="enter", size=4)}
        ran = {(line["step"], line["rank"]) for line in made.steps(size=4)}
        assert entered == ran, "a step was begun and not run to its end"
        done = [line for line in made.steps(rank=0) if line["generation"] > later]
        counts = sorted(line["step"] for line in done)
        assert counts == list(range(counts[0], counts[0] + len(counts))), "lost, or run twice"

        before = made.newest()
        third = made.start()
        made.wait_steps(5, after=before, size=4)
        before = made.newest()
        third.kill()
        made.wait_steps(5, after=before, size=2)
        assert all(len(hashes) == 1 for hashes in bits(made).values())

        made.order("raise a bug", rank=1)
        assert first.wait() == 64
        [step] = re.findall(r"same error again at step (\d+) after a roll", first.stderr)[:1]
        assert "train_step" in first.stderr
        assert len(made.lines(event="enter", rank=1, step=int(step))) <= 2


def test_the_last_copy_of_the_state_is_waited_for_and_its_loss_is_reported(tmp_path):
    """A frozen worker has it; then all are killed. Two workers and three replacements start."""
    flags = "--nnodes=1 --nproc-per-node=2"
    with training(tmp_path, flags, steps=100000, slow=0.1) as made:
        node = made.start()
        poll_for(lambda: stepped(made, 5, size=2), what="steps")
        dies, holds = (pids(made, rank=rank).pop() for rank in (0, 1))
        os.kill(holds, signal.SIGSTOP)
        reached = latest(made)
        os.kill(dies, signal.SIGKILL)
        said = r"Rank 1 is frozen and has the only copy of the state after \d+ steps: the job waits"
        poll_for(lambda: re.search(said, node.stderr), what="it is waited for")
        os.kill(holds, signal.SIGCONT)
        made.wait_steps(5, after=0, size=2)
        later = [line for line in made.steps() if line["generation"] > 0]
        assert min(line["step"] for line in later) >= reached - 1, "no finished step is lost"
        assert holds in {line["pid"] for line in later}
        assert all(len(hashes) == 1 for hashes in bits(made).values())
        assert (
            node.stderr.count("No checkpoint directory is set: if all workers are lost at once")
            == 1
        )
        for pid in pids(made, generation=made.newest()):
            os.kill(pid, signal.SIGKILL)
        lost = "All copies of the training state were lost: training restarts at step 0"
        poll_for(lambda: lost in node.stderr, what="the loss is told")
        node.process.terminate()
        assert node.wait() == 143


@pytest.mark.slow
def test_the_others_do_not_wait_for_the_evaluation_of_a_node_that_leaves(tmp_path):
    """It evaluates for ten minutes after step 5, which the others have done: they are in step 6.

    Three nodes import torch."""
    flags = "--nnodes=1:3 --nproc-per-node=1 --settle=60"
    with training(tmp_path, flags, steps=100000, slow=0.05, evaluates="1:5") as made:
        nodes = [made.start() for _ in range(3)]
        poll_for(lambda: len(made.lines(event="enter", step=6)) == 2, what="the others in step 6")
        poll_for(lambda: made.steps(step=5, rank=1), what="the evaluation")
        [leaver] = [n for n in nodes if n.events("workers-started")[0]["ranks"] == [1]]
        asked = time.monotonic()
        leaver.process.terminate()
        later = poll_for(lambda: made.steps(size=2), what="steps of two")
        assert min(line["at"] for line in later) < asked + 10
        assert min(line["step"] for line in later) == 6, "no finished step is lost"
        assert all(len(hashes) == 1 for hashes in bits(made).values())
        assert leaver.wait() == 143
        assert not any(world["restarts_used"] for world in nodes[0].events("world-formed"))


@pytest.mark.slow
def test_the_end_of_the_process_that_holds_the_stores_disturbs_nobody(tmp_path):
    """Two processes with stores import torch, each by itself."""
    flags = "--nnodes=1 --nproc-per-node=2"
    with training(tmp_path, flags, steps=100000, slow=0.1) as made:
        node = made.start()
        poll_for(lambda: stepped(made, 5, size=2), what="steps")
        workers = pids(made)
        os.kill(child_running(node.agent_pid, "store_host"), signal.SIGKILL)
        poll_for(
            lambda: "store host exited (killed by SIGKILL)" in node.stderr, what="it is missed"
        )
        reached = latest(made)
        poll_for(lambda: stepped(made, reached + 5, generation=0), what="steps of the same world")
        assert pids(made) == workers
        os.kill(max(workers), signal.SIGKILL)
        # The replacement may be ready before there is a store for a world without it.
        poll_for(
            lambda: any(stepped(made, 0, size=2, generation=later) for later in (1, 2)),
            what="a world at a new store",
        )
        node.process.terminate()
        assert node.wait() == 143


# --- another model -------------------------------------------------------------------------------

UNFIT = (
    "UnfitError: This worker's state differs from the other workers': parameter '0.weight' is "
    "float32 of shape (64, 16) on this worker and float32 of shape (32, 16) on the others. Start "
    "all workers with the same script and arguments."
)


def latest(made: Job) -> int:
    return max(line["step"] for line in made.steps())


def trains_on(made: Job, size: int) -> None:
    reached = latest(made)
    poll_for(lambda: stepped(made, reached + 10, size=size), what=f"steps of {size} workers")


def test_worker_with_another_model_ends_and_the_others_train_on(tmp_path):
    """A node that does not fit ends; a replacement that does not fit is done without; the last
    error cannot be helped by trying again, and ends the job.

    Two nodes import torch, one after the other."""
    flags = "--nnodes=1:3 --nproc-per-node=2 --settle=0.2"
    with training(tmp_path, flags, steps=100000, slow=0.1) as made:
        first = made.start()
        poll_for(lambda: stepped(made, 5, size=2), what="steps of one node")
        workers = pids(made)
        made.keys["model"] = "wide"
        second = made.start()
        assert second.wait() == 1
        assert UNFIT in second.stderr, made.said()
        trains_on(made, 2)
        assert pids(made) == workers
        assert len(made.lines(event="start")) == 4, "others were started in their place"
        assert len(first.events("world-formed")) <= 5, "they were taken again and again"

        made.give("wide")
        os.kill(made.steps(rank=1)[0]["pid"], signal.SIGKILL)
        poll_for(lambda: UNFIT in first.stderr, what="the misfit")
        trains_on(made, 1)
        assert len(made.lines(event="start")) == 5, "others were started in its place"
        assert all(len(hashes) == 1 for hashes in bits(made).values())

        made.order("fatal no use", rank=0)
        assert first.wait() == 64
        assert "a restart cannot help" in first.stderr
        assert "train_step" in first.stderr


@pytest.mark.slow
def test_a_replacement_with_another_model_that_is_waited_for_ends_the_job(tmp_path):
    flags = "--nnodes=1 --nproc-per-node=2 --world-sizes=2"
    with training(tmp_path, flags, steps=100000, slow=0.1) as made:
        node = made.start()
        poll_for(lambda: stepped(made, 5), what="steps")
        made.give("wide")
        os.kill(made.steps(rank=1)[0]["pid"], signal.SIGKILL)
        assert node.wait(120) == 64
        assert "without progress" in node.stderr
        assert UNFIT in node.stderr


@pytest.mark.slow
def test_without_a_launcher_every_process_is_its_own_node(tmp_path):
    """One does not fit, one joins and is killed. All three import torch."""
    with training(tmp_path, steps=100000, slow=0.1) as made, ExitStack() as stack:
        url = f"tcp://127.0.0.1:{made.port}/job?min_workers=1&max_workers=2"

        def start_process(stderr: int | None = None, **keys: str) -> subprocess.Popen[str]:
            command = [sys.executable, *made.command(url=url, **keys)]
            process = stack.enter_context(subprocess.Popen(command, text=True, stderr=stderr))
            stack.callback(process.kill)
            return process

        start_process()
        poll_for(lambda: stepped(made, 3, size=1), what="steps alone")
        wide = start_process(subprocess.PIPE, model="wide")
        assert UNFIT in wide.communicate(timeout=90)[1]
        assert wide.returncode == 1
        trains_on(made, 1)
        second = start_process()
        made.wait_steps(5, after=0, size=2)
        before = made.newest()
        second.kill()
        made.wait_steps(5, after=before, size=1)
        assert all(len(hashes) == 1 for hashes in bits(made).values())


# --- what is left after many kills ---------------------------------------------------------------

#: `SOAK=5` is 500 kills, about ten minutes.
KILLS = 100 * SOAK
#: The kills after which an agent has everything that it keeps.
WARM_UP = 20
#: KiB of the last 4,096 changes, which the store keeps for its watchers.
HISTORY = 8192
#: Threads for calls that wait, which asyncio starts when some come at once, and keeps.
AT_ONCE = 2


@dataclass(frozen=True)
class Held:
    """The resources of a process."""

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
    for path in made.written.iterdir():
        if alive(int(path.name.rpartition("-")[2])):
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
        agents = [made.start().agent_pid, made.start().agent_pid]
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
