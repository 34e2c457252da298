"""Jobs of `torchelastic submit slurm` on a real Slurm cluster, see `tests.slurm`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process.chaos_record import START
from tests.process.slurm_jobs import SlurmTraining, agents, kill_agents, output_of, run_the_bar
from tests.slurm import HIGH, SlurmCluster
from tests.support import poll_for

pytestmark = [pytest.mark.needs("slurm"), pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(3) as made:
        yield made


#: Begins on all nodes, and ends when it is told to.
PATIENT = """\
import os, time
print("worker", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "has no secret:",
      not [value for value in os.environ.values() if SECRET.read_text().strip() in value])
while not Path(__file__).with_name("end").exists():
    time.sleep(0.05)
"""


def submit(cluster: SlurmCluster, directory: Path, *flags: str) -> tuple[str, Path]:
    """Submit a script that needs no torch; its job, and the directory of the job."""
    script, job_dir = directory / "train.py", directory / "job"
    secret = f"SECRET = Path({str(job_dir / 'secret')!r})"
    script.write_text(f"from pathlib import Path\n{secret}\n{PATIENT}")
    cluster.environ = with_light_torch(cluster.environ)
    said = cluster.output(
        *(sys.executable, "-m", "torchelastic", "submit", "slurm", *flags),
        *("--job-dir", str(job_dir), "--", str(script)),
    )
    return re.findall(r"Submitted Slurm job (\d+)\.", said)[0], job_dir


def test_a_job_finds_its_nodes_and_hides_its_secret(cluster, tmp_path):
    """Three nodes start an agent each; nothing but srun tells them of each other."""
    number, job_dir = submit(cluster, tmp_path, "--nnodes=3")
    poll_for(lambda: output_of(job_dir).count("has no secret: True") == 3, what="three workers")
    secret = (job_dir / "secret").read_text().strip()
    commands = [Path(f"/proc/{pid}/cmdline") for node in cluster.nodes for pid in node.pids()]
    assert not [path for path in commands if path.exists() and secret in path.read_text()]
    (tmp_path / "end").touch()
    cluster.await_state(number, "COMPLETED")
    said = output_of(job_dir)
    found = (
        "endpoint host2:29400,host3:29400,host4:29400 (SLURM_STEP_NODELIST), "
        f"run id {number} (SLURM_JOB_ID), leaves on SIGTERM or SIGUSR1 with 30 s."
    )
    assert said.count(f"Slurm job {number}: {found}") == 3, said
    assert secret not in said
    assert "no secret: anyone" not in said
    assert f'"job": "{number}"' in (job_dir / "finished").read_text()


def test_a_cancelled_job_leaves_nothing_and_is_not_queued_again(cluster, tmp_path):
    number, job_dir = submit(cluster, tmp_path, "--nnodes=2:3")
    poll_for(lambda: "has no secret" in output_of(job_dir), what="workers")
    cluster.output("scancel", number)
    cluster.await_state(number, "CANCELLED")
    poll_for(lambda: not any(map(agents, cluster.nodes)), what="the end of all agents")
    assert "SIGTERM: leaving the job" in output_of(job_dir)
    assert cluster.output("squeue", "--noheader") == ""


def test_a_wrong_script_is_not_queued_again(cluster, tmp_path):
    (tmp_path / "train.py").write_text("import nothing_of_that_name\n")
    job_dir = tmp_path / "job"
    cluster.environ = with_light_torch(cluster.environ)
    said = cluster.output(
        *(sys.executable, "-m", "torchelastic", "submit", "slurm", "--nnodes=1"),
        *("--job-dir", str(job_dir), "--", str(tmp_path / "train.py")),
    )
    number = re.findall(r"Submitted Slurm job (\d+)\.", said)[0]
    cluster.await_state(number, "FAILED")
    assert cluster.job(number)["ExitCode"] == "64:0", output_of(job_dir)
    assert (job_dir / "failed").read_text() == "64"


@pytest.mark.slow
def test_one_node_drained_one_killed_and_the_job_requeued(cluster, tmp_path):
    """The bar. Three nodes import torch, then two once more."""
    training, took = run_the_bar(cluster, tmp_path / "training")
    wrong = training.proven()
    assert not wrong, training.told("\n".join(wrong))
    redone = training.redone()
    assert max(redone.values()) <= 1, training.told(f"{redone}, {took}")


@pytest.mark.slow
def test_a_job_that_is_preempted_or_comes_to_its_limit_is_queued_again(cluster, tmp_path):
    """Run + keep. What --signal sends before the limit is sent by scancel, which need not wait for
    it. Three nodes import torch three times."""
    training = SlurmTraining(cluster, tmp_path / "training", "--nnodes=2:3 --settle=5", "script")
    training.reach(4, 3)
    urgent = cluster.output(
        "sbatch",
        "--parsable",
        f"--partition={HIGH}",
        "--nodes=3",
        "--wrap=sleep 1",
        "--output=none",
    )
    cluster.await_state(urgent, "COMPLETED", timeout=120)
    training.reach(8, 3, after=START - 1)
    training.leave_by("scancel", "--signal=TERM", f"{training.number}.0")
    training.reach(training.gate + 4, 3, after=2 * START - 1)
    training.finish()
    wrong = training.proven()
    assert not wrong, training.told("\n".join(wrong))
    assert max(training.redone().values()) <= 1, training.told(str(training.redone()))
    assert cluster.job(training.number)["Restarts"] == "2"


def test_a_job_gets_all_idle_nodes_and_does_without_one_that_is_killed(cluster, tmp_path):
    number, job_dir = submit(cluster, tmp_path, "--nnodes=1:3")
    poll_for(lambda: output_of(job_dir).count("of 3 has no secret") == 3, what="three workers")
    assert cluster.job(number)["NumCPUs"] == str(3 * (os.cpu_count() or 1))
    kill_agents(cluster.nodes[2])
    poll_for(lambda: output_of(job_dir).count("of 2 has no secret") == 2, what="two workers")
    (tmp_path / "end").touch()
    cluster.await_state(number, "COMPLETED")


@pytest.mark.slow
def test_before_its_time_limit_a_job_leaves_and_is_queued_again(cluster, tmp_path):
    """Slurm looks at limits, which are whole minutes, every half minute."""
    number, job_dir = submit(cluster, tmp_path, "--nnodes=2:3", "--time=2", "--notice=60")
    poll_for(
        lambda: output_of(job_dir).count("has no secret") >= 6, what="a second start", timeout=240
    )
    said = output_of(job_dir)
    assert "SIGTERM: leaving the job" in said
    assert (
        f"Interrupted (exit code 143) before the training was complete: queueing job {number}"
        in said
    )
    (tmp_path / "end").touch()
    cluster.await_state(number, "COMPLETED")
    assert cluster.job(number)["Restarts"] == "1"


def test_a_job_array_grows_and_shrinks_by_its_tasks(cluster, tmp_path):
    """Each task is a node; they find each other through Slurm. A task that starts after the end has
    nothing to do."""
    number, job_dir = submit(cluster, tmp_path, "--array", "--nnodes=1:4")
    # Three nodes for four tasks: the last one waits in the queue.
    poll_for(lambda: output_of(job_dir).count("of 3 has no secret") == 3, what="three tasks")
    running = cluster.output("squeue", "--noheader", "--states=RUNNING", "--format=%N").split()
    assert sorted(running) == [node.name for node in cluster.nodes]
    cluster.output("scancel", f"{number}_2")
    poll_for(lambda: "of 3 has no secret" in said_by(job_dir, 3), what="the fourth task")
    (tmp_path / "end").touch()
    poll_for(lambda: cluster.output("squeue", "--noheader") == "", what="the end")
    late = cluster.output(
        *("env", f"TORCHELASTIC_JOB_DIR={job_dir}", sys.executable, "-m", "torchelastic", "run"),
        *("--nnodes=1:4", "--rdzv-endpoint=host1:29400", f"--rdzv-id={number}", "--"),
        str(tmp_path / "train.py"),
    )
    assert late == ""
    assert (job_dir / "finished").exists()


def said_by(job_dir: Path, task: int) -> str:
    return "".join(path.read_text() for path in job_dir.glob(f"slurm-*_{task}.out"))
