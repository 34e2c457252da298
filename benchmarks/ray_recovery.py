"""What the loss of a node costs a job on Ray: `torchelastic.ray.run` beside Ray Train.

Three Ray nodes of one worker each, as raylets on this machine. One node is killed and one is added.
See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import processes, runs
from benchmarks.harness.report import about, failures, load, seconds, table
from benchmarks.harness.results import Results, about_this_run
from benchmarks.harness.scenarios import Repetition, quiet_seconds
from benchmarks.harness.step_logs import StepLogs
from benchmarks.harness.summary import summarize

HERE = Path(__file__).resolve().parent
ROW = "node"
CONTESTANTS = ("torchelastic", "ray-train")
REPETITIONS = 5
NODES = 3
#: Seconds for a world to come about, and for all of one repetition.
PATIENCE, LONGEST = 150.0, 600.0
#: How often Ray Train looks whether it can grow; its default is 60 s.
RESIZE_INTERVAL = 5.0


def run_torchelastic(directory: Path) -> None:
    import torchelastic.ray

    args = [f"--record={directory / 'logs'}", f"--checkpoint={directory / 'checkpoint.pt'}"]
    script = str(HERE / "resident_train.py")
    torchelastic.ray.run(script, args, nnodes=f"2:{NODES}", check=False)


def run_ray_train(directory: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from benchmarks.peers.ray_train import train

    TorchTrainer(
        train,
        train_loop_config={"directory": str(directory)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=(2, NODES), elastic_resize_monitor_interval_s=RESIZE_INTERVAL
        ),
        run_config=RunConfig(
            name="job",
            storage_path=str(directory / "storage"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()


def measure(who: str, index: int, directory: Path) -> dict[str, Any]:
    """One job in a cluster of its own: a node is killed, another is added."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(NODES)]
    ray.init(address=cluster.address, log_to_driver=False)
    job = {"torchelastic": run_torchelastic, "ray-train": run_ray_train}[who]
    threading.Thread(target=job, args=(directory,), daemon=True).start()
    logs = StepLogs(directory / "logs")
    quiet = quiet_seconds(index)
    logs.wait_for(
        lambda seen: seen.trained_for(NODES, time.monotonic()) >= quiet,
        f"a world of {NODES}",
        PATIENCE,
    )
    step = logs.history.step_seconds(logs.history.latest().world)
    known = set(logs.history.spans)
    victim = nodes[index % NODES]
    raylet = victim.all_processes["raylet"][0].process.pid
    others = [one.process.pid for many in victim.all_processes.values() for one in many]
    pids = [raylet, *processes.descendants(raylet), *others]
    killed = time.monotonic()
    processes.kill(pids)
    noticed: list[float] = []
    threading.Thread(target=_watch, args=(victim.node_id, killed, noticed), daemon=True).start()
    cluster.add_node(num_cpus=1)
    first = logs.wait_for(
        lambda seen: seen.first_finish(after=killed, not_in=known), "a step", PATIENCE
    )
    full = logs.wait_for(
        lambda seen: seen.first_finish(after=killed, not_in=known, size=NODES),
        "all three",
        PATIENCE,
    )
    redone = max(finish.number for finish in logs.history.finishes if finish.world in known)
    return {
        "next": first.time - killed,
        "size": first.size,
        "full": full.time - killed,
        "step": step,
        "redone": max(0, redone - first.number + 1),
        "noticed": noticed[0] if noticed else None,
    }


def _watch(node: str, since: float, noticed: list[float]) -> None:
    import ray

    while not noticed:
        if any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes()):
            noticed.append(time.monotonic() - since)
        time.sleep(0.1)


def one(who: str, index: int) -> None:
    """A repetition, in a process of its own: print what was found and leave nothing behind."""
    processes.become_subreaper()
    with tempfile.TemporaryDirectory(prefix="bray-", dir="/tmp") as name:
        os.environ.update(RAY_TMPDIR=name, XDG_RUNTIME_DIR=name, RAY_TRAIN_V2_ENABLED="1")
        places = [HERE, HERE.parent, HERE.parent / "src"]
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, places))
        try:
            print(json.dumps(measure(who, index, Path(name))), flush=True)
        finally:
            processes.end_descendants()
    os._exit(0)  # the threads of jobs that were killed


class Run(runs.Run[Results]):
    """The contestants take turns."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, Results(about_this_run()))

    def perform(self, row: str) -> None:
        for index in range(self.arguments.repetitions):
            for who in self.arguments.only:
                found = self._repetition(who, index)
                full = found.details.get("full")
                self._progress.keep(self.results, row, who, index, found, full)

    def _repetition(self, who: str, index: int) -> Repetition:
        command = [sys.executable, __file__, "--one", who, str(index)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            processes.end_descendants()
            return Repetition(None, f"not done after {LONGEST:g} s")
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            return Repetition(None, "failed", output=done.stderr[-3000:])
        details = json.loads(lines[-1])
        return Repetition(details["next"], details=details)

    def finish(self) -> None:
        processes.end_descendants()
        super().finish()


def render(results: Results) -> str:
    head = ("", "next step", "all three train", "steps redone", "Ray says the node is dead")
    rows = []
    for who in results.faults.get(ROW, {}):
        found = [one.details for one in results.repetitions(ROW, who) if one.seconds is not None]
        cells = [
            seconds(summarize([one[key] for one in found])) for key in ("next", "full", "noticed")
        ]
        redone = f"{statistics.median(one['redone'] for one in found):g}" if found else ""
        rows.append((who, cells[0], cells[1], redone, cells[2]))
    note = (
        f"Seconds from the kill, medians (min to max). Ray {_ray_version()}. Ray Train: elastic, "
        f"(2, {NODES}) workers, gloo, a checkpoint every 10 steps, looks every "
        f"{RESIZE_INTERVAL:g} s whether it can grow (default 60)."
    )
    parts = [about(results), load(results), table(head, rows), note, *failures(results)]
    return "\n\n".join(parts) + "\n"


def _ray_version() -> str:
    from importlib import metadata

    return metadata.version("ray")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, (ROW,))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--only", type=lambda text: text.split(","), default=CONTESTANTS)
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse(None)
    if arguments.one:
        one(arguments.one[0], int(arguments.one[1]))
    keep = partial(runs.save, directory=arguments.results, name="ray")
    everything = tuple(arguments.only) == CONTESTANTS and arguments.repetitions >= REPETITIONS
    return runs.carry_out(arguments, Run, render, keep, everything=everything)


if __name__ == "__main__":
    sys.exit(main())
