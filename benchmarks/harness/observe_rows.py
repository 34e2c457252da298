"""What `observe.py` does: being seen, part by part and in whole steps; and those who disturb."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.harness import processes
from benchmarks.harness.job import Job, JobFailed
from benchmarks.harness.launchers import OURS
from benchmarks.harness.results import Results

HERE = Path(__file__).resolve().parent.parent
PATIENCE = 300.0
MODES = ("plain", "script", "train")
#: Steps that are seen, or not, in a row.
BLOCK = 20
#: Browser tabs; and of those who ask for the page and never read it.
TABS, SLOW = 100, 10
#: What is done to a job that trains.
QUIET, DISK, PAGE, STUCK = "nothing (A/A)", "full disk", f"{TABS} tabs", f"{SLOW} that never read"
DISTURBED = (QUIET, DISK, PAGE, STUCK)


@dataclass
class ObserveResults(Results):
    """Everything one run of `observe.py` measured."""

    #: By part: nanoseconds of processor time, by repetition.
    parts: dict[str, list[float]] = field(default_factory=dict)
    #: By part: system calls in a step; None where strace cannot be used.
    calls: dict[str, float] | None = None
    #: By number of workers: nanoseconds of the agent's for a look at them, by repetition.
    looks: dict[str, list[float]] = field(default_factory=dict)
    #: Share of a core of the agent of two workers that train, and of its page.
    agent_cpu_percent: float | None = None
    #: By name: seconds of a step with and without something.
    pairs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    failed_rows: list[str] = field(default_factory=list)


# --- part by part ---------------------------------------------------------------------------------


def parts(results: ObserveResults, repetitions: int) -> None:
    """Processor time and system calls of each."""
    command = [sys.executable, str(HERE / "observe_parts.py")]
    timed = subprocess.run([*command, "time", str(repetitions)], capture_output=True, check=True)
    found = json.loads(timed.stdout)
    results.parts, results.looks = found["step"], found["agent"]
    results.calls = _traced([*command, "trace"])


def _traced(command: Sequence[str]) -> dict[str, float] | None:
    from benchmarks.observe_parts import STEPS

    strace = ["strace", "-e", "signal=none", "-o", "/dev/stdout", *command]
    try:
        done = subprocess.run(strace, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return None
    calls = calls_between(done.stdout.splitlines())
    return {name: count / STEPS for name, count in calls.items()} or None


def calls_between(lines: Sequence[str]) -> dict[str, int]:
    """From strace's lines: how many calls lie between `begin NAME` and `end NAME` on stderr."""
    found: dict[str, int] = {}
    name: str | None = None
    for line in lines:
        if mark := re.match(r'write\(2, "(begin|end) (.*)\\n"', line):
            name = mark[2] if mark[1] == "begin" else None
            if name is not None:
                found[name] = 0
        elif name is not None:
            found[name] += 1
    return found


# --- whole steps ----------------------------------------------------------------------------------


def steps(results: ObserveResults, mode: str, rounds: int) -> None:
    """Of one worker that is seen in some blocks of steps, and not in others."""
    counts = (f"--block={BLOCK}", f"--steps={4 * rounds * BLOCK}")
    arguments = (f"--mode={mode}", *counts, "--size=10k", "--accelerator=0")
    with Job(OURS, "observe_train.py", arguments, workers=1, elastic=False) as job:
        node = job.start_node()
        job.wait_for(lambda: node.process.poll() is not None, PATIENCE)
        if node.process.poll() != 0:
            raise JobFailed(f"{mode} did not end well\n{job.output()}")
        [path] = (job.directory / "logs").glob("blocks-*.jsonl")
        blocks = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
    seen, control = in_turn(blocks)
    results.pairs[mode] = seen
    results.pairs[f"{mode}, A/A"] = control


def in_turn(
    blocks: Sequence[float],
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Of blocks `seen, not, seen, seen`: pairs of seen and not, and of seen and seen.

    Each pair of the first kind has the mean of the seen blocks before and after the other. The
    first round warms up and is not counted.
    """
    rounds = [blocks[at : at + 4] for at in range(4, len(blocks) - 3, 4)]
    seen = [((before + after) / 2, without) for before, without, after, _ in rounds]
    return seen, [(third, fourth) for _, _, third, fourth in rounds]


# --- the agent ------------------------------------------------------------------------------------


def agent(results: ObserveResults, seconds: float) -> None:
    """Its processor time while two workers train."""
    with Job(OURS, "resident_train.py", workers=2, elastic=False) as job:
        job.start_node()
        job.wait_training(2, quiet=2.0)
        watched = processes.parent(job.history.latest().pids[0])
        before = processes.cpu_seconds(watched)
        time.sleep(seconds)
        used = processes.cpu_seconds(watched) - before
    results.agent_cpu_percent = 100 * used / seconds


# --- those who disturb ----------------------------------------------------------------------------


def disturbed(results: ObserveResults, pairs: int, seconds: float) -> None:
    """Stretches with and without each of them, of one worker that trains."""
    launcher = replace(OURS, flags=(*OURS.flags, "--dashboard"))
    with Job(launcher, "resident_train.py", ("--size=10k",), workers=1, elastic=False) as job:
        job.start_node()
        job.wait_training(1, quiet=2.0)
        for number in range(pairs):
            for what in DISTURBED if number % 2 else DISTURBED[::-1]:
                pair = _pair(job, what, seconds, disturbed_first=number % 2 == 0)
                results.pairs.setdefault(what, []).append(pair)


def _pair(job: Job, what: str, seconds: float, *, disturbed_first: bool) -> tuple[float, float]:
    found: dict[bool, float] = {}
    for is_disturbed in (disturbed_first, not disturbed_first):
        with _disturbance(job, what) if is_disturbed else nullcontext():
            began = time.monotonic()
            time.sleep(seconds)
            found[is_disturbed] = _step_time(job, began, time.monotonic())
    return found[True], found[False]


def _step_time(job: Job, began: float, ended: float) -> float:
    """The median of the steps that lie in a stretch of time."""
    [path] = (job.directory / "logs").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    took = [
        line["t"] - line["began"]
        for line in lines
        if line["event"] == "step" and began <= line["began"] and line["t"] <= ended
    ]
    if not took:
        raise JobFailed("no step in a stretch of time")
    return median(took)


def _disturbance(job: Job, what: str) -> AbstractContextManager[None]:
    made: dict[str, Callable[[], AbstractContextManager[None]]] = {
        QUIET: nullcontext,
        DISK: lambda: _no_room(processes.parent(job.history.latest().pids[0])),
        PAGE: lambda: _readers(_page(job), TABS, read=True),
        STUCK: lambda: _readers(_page(job), SLOW, read=False),
    }
    return made[what]()


@contextmanager
def _no_room(pid: int) -> Iterator[None]:
    """None of the files of this process may grow: what a full disk is to a program."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def _page(job: Job) -> tuple[str, int]:
    """Where the page is, as the agent says."""
    said = (job.directory / "node-0.out").read_text(errors="replace")
    where = re.search(r"dashboard: http://(?:localhost|127\.0\.0\.1):(\d+)/", said)
    if where is None:
        raise JobFailed(f"nobody says where the page is\n{job.output()}")
    return "127.0.0.1", int(where[1])


#: A process of its own, as browsers are: many connections that read whatever comes.
_TABS = """
import selectors, sys
from benchmarks.harness.observe_rows import connected
chosen = selectors.DefaultSelector()
tabs = [connected(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
for tab in tabs:
    chosen.register(tab, selectors.EVENT_READ)
print("open", flush=True)
while True:
    for ready, _ in chosen.select():
        if not ready.fileobj.recv(1 << 20):
            chosen.unregister(ready.fileobj)
"""


def connected(where: tuple[str, int], room: int = 0) -> socket.socket:
    """Somebody who has asked for the page's events."""
    made = socket.socket()
    if room:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    made.connect(where)
    made.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return made


@contextmanager
def _readers(where: tuple[str, int], count: int, *, read: bool) -> Iterator[None]:
    with ExitStack() as opened:
        if not read:
            for _ in range(count):
                opened.enter_context(connected(where, room=2048))
            yield
            return
        tabs = subprocess.Popen(
            [sys.executable, "-c", _TABS, str(where[1]), str(count)],
            stdout=subprocess.PIPE,
            cwd=HERE.parent,
        )
        opened.enter_context(tabs)
        opened.callback(tabs.kill)
        assert tabs.stdout is not None
        tabs.stdout.readline()
        yield
