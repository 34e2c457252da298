"""The demo behind scripts/demo: two nodes on this machine, three faults, and what each costs.

The costs are read from the workers' own step lines: the time in which no step was finished.
With --bits: the same faults, and the weights beside those of the same job on one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import same_weights

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120.0


class Demo:
    """An elastic job whose nodes are agents on this machine."""

    def __init__(self, directory: Path, verbose: bool, script: str, *, workers: int = 2) -> None:
        self.directory = directory
        self.verbose = verbose
        self.workers = workers
        self.record = directory / "steps"
        self.record.mkdir(parents=True)
        self.script = [str(ROOT / "examples" / script), "--steps=1000000"]
        self.script.append(f"--record={self.record}")
        self.port = free_port()
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.began = time.monotonic()
        #: What was done to the job, and when.
        self.faults: list[tuple[float, str]] = []

    def tell(self, mark: str, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {mark} {text}", flush=True)

    def fault(self, text: str) -> float:
        self.faults.append((time.monotonic(), text))
        return self.faults[-1][0]

    def start_node(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torchelastic", "run"),
            *("--nnodes=1:3", f"--nproc-per-node={self.workers}", "--rdzv-id=demo"),
            *(f"--rdzv-endpoint=127.0.0.1:{self.port}", *self.script),
        ]
        output = None if self.verbose else (self.directory / f"node{len(self.nodes)}").open("wb")
        node = subprocess.Popen(command, stdout=output, stderr=output)
        self.nodes.append(node)
        return node

    def is_hosted(self) -> dict[str, float] | None:
        """Whether the first node listens: it is the one that must not be killed."""
        with socket.socket() as sock:
            return {"t": 0.0} if sock.connect_ex(("127.0.0.1", self.port)) == 0 else None

    def steps(self) -> list[dict[str, Any]]:
        """All finished steps of all workers, in order of time."""
        found = []
        for path in self.record.iterdir():
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    found.append({**json.loads(line), "pid": int(path.stem)})
        return sorted(found, key=lambda step: step["t"])

    def trains(self, size: int, since: float, least: int = 0) -> dict[str, float] | None:
        """The first step after `since` that a world of `size` workers finished, all of them; of
        at least this number."""
        seen: dict[float, set[float]] = {}
        for step in self.steps():
            if step["t"] > since and step["size"] == size and step["step"] >= least:
                ranks = seen.setdefault(step["step"], set())
                ranks.add(step["rank"])
                if len(ranks) == size:
                    return step
        return None

    def wait(self, probe: Callable[[], dict[str, float] | None], what: str) -> dict[str, float]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = probe()
            if found:
                return found
            if any(node.poll() not in (None, -signal.SIGKILL) for node in self.nodes):
                raise SystemExit(f"a node ended too early while waiting for {what}")
            time.sleep(0.05)
        raise SystemExit(f"not seen within {PATIENCE:g} s: {what}")

    def train_on(self, count: int) -> None:
        """Let the job train undisturbed for a while."""
        last = self.steps()[-1]["step"]
        self.wait(
            lambda: next((s for s in reversed(self.steps()) if s["step"] >= last + count), None),
            f"{count} more steps",
        )

    def worker(self) -> dict[str, float]:
        """The worker with the highest rank that trains now."""
        return max(self.steps()[-8:], key=lambda step: step["rank"])

    def longest_pause(self, since: float, until: float) -> float:
        """The longest time in which no worker finished a step."""
        times = [step["t"] for step in self.steps() if since - 1 <= step["t"] <= until]
        return max(b - a for a, b in pairwise(times))

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                node.terminate()
        for node in self.nodes:
            node.wait(60)


def disturb(demo: Demo, pause: int = 100) -> None:
    """Kill a worker, kill a node, start a node; `pause` steps lie between."""
    demo.tell("·", "two nodes of two workers each are started")
    demo.start_node()
    demo.wait(demo.is_hosted, "the first node to host the rendezvous")
    second = demo.start_node()
    demo.wait(lambda: demo.trains(4, 0), "the first steps of four workers")
    demo.tell("✔", "4 workers on 2 nodes train")
    demo.train_on(pause)

    victim = demo.worker()
    fault = demo.fault("a worker is killed")
    os.kill(int(victim["pid"]), signal.SIGKILL)
    demo.tell("✘", f"kill -9 of a worker (rank {victim['rank']:.0f})")
    step = demo.wait(lambda: demo.trains(4, fault), "four workers after the kill")
    demo.tell("✔", f"all 4 workers train again: {step['t'] - fault:.2f} s after the kill")
    demo.train_on(pause)

    fault = demo.fault("a node is killed")
    kill_node(second)
    demo.tell("✘", "kill -9 of a node: its agent and both its workers")
    step = demo.wait(lambda: demo.trains(2, fault), "the survivors")
    demo.tell("✔", f"the other 2 workers train on: {step['t'] - fault:.2f} s after the kill")
    demo.train_on(pause)

    fault = demo.fault("a node is started")
    demo.start_node()
    demo.tell("+", "another node is started; it warms up while the others train")
    step = demo.wait(lambda: demo.trains(4, fault), "four workers with the newcomer")
    pause = demo.longest_pause(fault, step["t"])
    demo.tell("✔", f"4 workers train: no step for {pause:.2f} s")
    demo.train_on(pause)


def compare(demo: Demo, alone: Demo) -> bool:
    """Disturb a job, and show its weights beside those of one worker that nothing happens to."""
    demo.tell("·", "one worker trains the same job alone")
    alone.start_node()
    disturb(demo, pause=30)
    last = int(demo.steps()[-1]["step"])
    alone.wait(lambda: alone.trains(1, 0, last), f"step {last} of the worker that trains alone")
    found, expected = digests(demo), digests(alone)
    common = sorted(found.keys() & expected.keys())
    step = common[-1]
    print(f"\nSHA-256 of the weights after {step} steps:")
    for name, by in (("killed, shrunk, grown", found), ("one worker, undisturbed", expected)):
        print(f"  {name:24}", *sorted(by[step]))
    different = [step for step in common if len(found[step] | expected[step]) > 1]
    if different:
        print(f"✘ They differ, for the first time after {different[0]} steps.")
    else:
        print(f"✔ The same, to the bit, after each of {len(common) - 1} steps and on all workers.")
    return not different


def digests(demo: Demo) -> dict[int, set[str]]:
    """By the number of steps: the hash of the weights; of all workers that have written one."""
    found: dict[int, set[str]] = {}
    for step in demo.steps():
        found.setdefault(int(step["step"]), set()).add(step["digest"])
    return found


def draw(demo: Demo, path: Path) -> None:
    """Every finished step as a dot: one row a worker, the faults as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = demo.steps()
    begin = demo.faults[0][0] - 1.5
    shown = [step for step in steps if step["t"] >= begin]
    rows = {pid: row for row, pid in enumerate(dict.fromkeys(step["pid"] for step in shown))}
    figure, axes = pyplot.subplots(figsize=(10, 3.6), dpi=150)
    times = [step["t"] - begin for step in shown]
    colours = ["#d9480f" if step["size"] == 4 else "#1971c2" for step in shown]
    axes.scatter(times, [rows[step["pid"]] for step in shown], s=2, c=colours, linewidths=0)
    for moment, text in demo.faults:
        axes.axvline(moment - begin, color="#212529", lw=1)
        axes.annotate(f" {text}", (moment - begin, len(rows) - 0.3), fontsize=9)
    axes.set_ylim(len(rows) - 0.5 + 1.2, -0.5)
    axes.set_yticks([])
    axes.set_xlabel("seconds")
    axes.set_ylabel("worker processes")
    axes.set_title("Every dot is a finished step: of 4 workers (orange), of 2 (blue)", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def kill_node(guard: subprocess.Popen[bytes]) -> None:
    """As when the power goes: the agent first, then the process that would clean up after it."""
    children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()
    for pid in (*map(int, children), guard.pid):
        os.kill(pid, signal.SIGKILL)
    guard.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="show what the nodes print")
    parser.add_argument("--picture", type=Path, help="draw it (needs matplotlib)")
    parser.add_argument("--bits", action="store_true", help="compare the weights with one worker's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchelastic_demo_") as directory:
        sys.exit(0 if run(Path(directory), arguments) else 1)


def run(directory: Path, arguments: argparse.Namespace) -> bool:
    """Show the demo that was asked for; return whether it ended as it should."""
    script = "train_same_weights.py" if arguments.bits else "train.py"
    with ExitStack() as jobs:
        demo = Demo(directory / "demo", arguments.verbose, script)
        jobs.callback(demo.close)
        if arguments.bits:
            alone = Demo(directory / "alone", arguments.verbose, script, workers=1)
            jobs.callback(alone.close)
            is_same = compare(demo, alone)
            if arguments.picture:
                picture = same_weights.draw(demo.steps(), alone.steps(), demo.faults)
                arguments.picture.write_text(picture)
            return is_same
        demo.script.append(f"--checkpoint={demo.directory}/checkpoint.pt")
        disturb(demo)
        demo.tell("·", f"{demo.steps()[-1]['step']:.0f} steps done; stopping")
        if arguments.picture:
            draw(demo, arguments.picture)
    return True


if __name__ == "__main__":
    main()
