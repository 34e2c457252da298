"""A training of `chaos_worker`s on a real Slurm cluster, submitted as a user does, and judged."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.netns import Host
from tests.process.chaos_record import START
from tests.process.gated_training import PATIENCE, GatedTraining
from tests.process.jobs import words_of
from tests.slurm import SlurmCluster


class SlurmTraining(GatedTraining):
    """A job of `torchelastic submit slurm`."""

    def __init__(self, cluster: SlurmCluster, directory: Path, flags: str, mode: str) -> None:
        super().__init__(directory, mode, checkpoints=directory / "checkpoints", every=100000)
        self.cluster, self.job_dir = cluster, directory / "job"
        submitted = cluster.output(
            *(sys.executable, "-m", "torchelastic", "submit", "slurm", *flags.split()),
            *("--job-dir", str(self.job_dir), "--", *self.command),
        )
        self.number = submitted.partition("Submitted Slurm job ")[2].partition(".")[0]

    def leave_by(self, *command: str) -> None:
        """Let all nodes leave by a command: they do so between two steps, so there must be some."""
        self.cluster.output(*command)

        def gone() -> bool:
            self.open(self.gate + 1)
            return not any(map(agents, self.cluster.nodes))

        self.wait_for(gone, "nodes that have left")

    def finish(self) -> None:
        """Let the job come to the end of the epoch it is in, and wait until Slurm knows."""
        self.last_epoch()
        ended = self.cluster.await_state(
            self.number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout=PATIENCE
        )
        assert ended == "COMPLETED", self.told(f"the job has {ended}")

    def said(self) -> str:
        return self.cluster.run("squeue").stdout + output_of(self.job_dir)


def output_of(job_dir: Path) -> str:
    """The output of a job, over all its starts."""
    return "".join(path.read_text() for path in sorted(job_dir.glob("slurm-*.out")))


def run_the_bar(cluster: SlurmCluster, directory: Path) -> tuple[SlurmTraining, dict[str, float]]:
    """Train on three nodes; one is drained and taken from the job, one is killed, and the job is
    requeued. Returns the finished training, and the seconds from each event to the next step."""
    training = SlurmTraining(cluster, directory, "--nnodes=1:3 --settle=5", "train")
    took: dict[str, float] = {}
    generation = training.reach(6, 3)

    def strike(event: str, step: int, size: int, after: int, *commands: tuple[str, ...]) -> int:
        began = time.monotonic()
        for command in commands:
            cluster.output(*command)
        reached = training.reach(step, size, after)
        took[event] = time.monotonic() - began
        return reached

    _, killed, drained = cluster.nodes
    rest = ",".join(node.name for node in cluster.nodes if node is not drained)
    generation = strike(
        *("drained", 12, 2, generation),
        ("scontrol", "update", f"nodename={drained.name}", "state=drain", "reason=test"),
        ("scontrol", "update", f"jobid={training.number}", f"nodelist={rest}"),
    )
    kill_agents(killed)
    generation = strike("killed", 18, 1, generation)
    began = time.monotonic()
    training.leave_by("scontrol", "requeue", training.number)
    generation = training.reach(training.gate, 2, START - 1)
    took["requeued"] = time.monotonic() - began
    training.reach(training.gate + 6, 2, generation - 1)
    training.finish()
    return training, took


def agents(host: Host) -> list[int]:
    """The agents of jobs on a host: what `kill -9` of a node's processes hits."""
    return [pid for pid in host.pids() if {"torchelastic", "run"} <= {*words_of(pid)}]


def kill_agents(host: Host) -> None:
    for pid in agents(host):
        os.kill(pid, signal.SIGKILL)
