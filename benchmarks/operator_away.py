"""Three nodes of an ElasticJob on a real control plane; its controller is away for a minute.

    python benchmarks/operator_away.py [--away 60]

Prints the longest time without a step before the controller was killed, while it was away, and
after another one was started; then a worker is killed while no controller runs. Needs root, etcd
and the programs of KUBEBUILDER_ASSETS; see tests/kubernetes.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.step_logs import StepLogs
from benchmarks.harness.worker_log import History, Step
from tests.kubelet import Kubelet
from tests.kubernetes import ControlPlane
from tests.process.operator_process import install, operator
from tests.support import poll_for

SCRIPT = Path(__file__).resolve().with_name("resident_train.py")
NODES = 3
#: Seconds before the controller is killed and after the next one leads.
WITH_CONTROLLER = 20.0
PATIENCE = 180.0


def longest_pause(steps: Sequence[Step], begin: float, end: float) -> float:
    times = sorted(step.finished for step in steps if begin <= step.finished <= end)
    return max(b - a for a, b in zip([begin, *times], [*times, end], strict=True))


def submit(plane: ControlPlane, record: Path, directory: str) -> None:
    command = ["submit", "kubernetes", "--as=elasticjob", "--name=train", "--namespace=default"]
    command += ["--image=none", f"--nnodes=2:{NODES}", "--nproc-per-node=1", "--"]
    command += [str(SCRIPT), f"--record={record}"]
    subprocess.run(
        [sys.executable, "-m", "torchelastic", *command, f"--checkpoint={directory}/checkpoint"],
        env={**os.environ, "KUBECONFIG": plane.kubeconfig},
        check=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--away", type=float, default=60.0, help="seconds")
    away = parser.parse_args().away
    with (
        tempfile.TemporaryDirectory() as directory,
        ControlPlane() as plane,
        Kubelet(plane, nodes=NODES),
    ):
        record = Path(directory, "record")
        logs, account = StepLogs(record), install(plane)
        with operator(account, Path(directory, "first")) as first:
            submit(plane, record, directory)
            logs.wait_for(
                lambda seen: seen.first_finish(after=0.0, size=NODES), "a world", PATIENCE
            )
            began = time.monotonic()
            time.sleep(WITH_CONTROLLER)
            first.end(signal.SIGKILL)
        killed = time.monotonic()
        time.sleep(away)
        back = time.monotonic()
        with operator(account, Path(directory, "second")) as second:
            poll_for(second.leads, what="the next controller leads", timeout=PATIENCE)
            time.sleep(WITH_CONTROLLER)
        end = time.monotonic()
        print("\n| | longest time without a step | worlds |\n| --- | --- | --- |")
        rows = {
            "with the controller": (began, killed),
            "without": (killed, back),
            "with the next": (back, end),
        }
        steps = logs.read().steps
        for name, (since, until) in rows.items():
            pause = longest_pause(steps, since, until)
            worlds = {step.generation for step in steps if since <= step.finished <= until}
            print(f"| {name}, {until - since:.0f} s | {pause * 1000:.0f} ms | {len(worlds)} |")
        last = max(steps, key=lambda step: step.finished)
        os.kill(last.pid, signal.SIGKILL)
        struck = time.monotonic()

        def next_world(seen: History) -> float:
            found = (s.finished for s in seen.steps if s.generation > last.generation)
            return min(found, default=0.0)

        took = logs.wait_for(next_world, "a new world", PATIENCE) - struck
        print(f"\nA worker killed without a controller: next step after {took:.2f} s")
        logs.close()
        plane.api.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
