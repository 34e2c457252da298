"""The script for sbatch."""

import doctest
import subprocess
from pathlib import Path

import pytest

from torchelastic.cluster.submit import slurm_script
from torchelastic.cluster.submit.slurm_script import SlurmJob, script
from torchelastic.errors import ConfigError


def job(**changes):
    given = {
        "name": "train.py",
        "directory": "/shared/job 1",
        "min_nodes": 2,
        "max_nodes": 4,
        "command": ["python", "-m", "torchelastic", "run", "--", "train.py", "a b"],
        "notice": 120,
    }
    return SlurmJob(**(given | changes))


def options(made):
    marked = [line for line in made.splitlines() if line.startswith("#SBATCH ")]
    return [line.removeprefix("#SBATCH ") for line in marked]


def run(directory, wanted, *, SLURM_JOB_ID="", SLURM_ARRAY_JOB_ID="", **programs):
    """Run the script with these programs in place of Slurm's."""
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    numbers = {"SLURM_JOB_ID": SLURM_JOB_ID, "SLURM_ARRAY_JOB_ID": SLURM_ARRAY_JOB_ID}
    environ = {"PATH": f"{directory}:/usr/bin:/bin", **numbers}
    return subprocess.run(
        ["bash", "-c", script(wanted)], env=environ, capture_output=True, text=True
    )


def test_a_lost_node_does_not_end_the_job_and_a_limit_is_announced():
    made = script(job(time="4:00:00", partition="gpu", options=["--gpus-per-node=8"]))
    assert options(made) == [
        "--job-name=train.py",
        "--nodes=2-4",
        "--exclusive",
        "--no-kill",
        "--requeue",
        "--open-mode=append",
        "--signal=TERM@120",
        "--output='/shared/job 1/slurm-%j.out'",
        "--time=4:00:00",
        "--partition=gpu",
        "--gpus-per-node=8",
    ]
    assert "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0" in made
    assert "torchelastic run -- train.py 'a b'" in made


def test_a_job_array_has_a_task_for_each_node():
    made = script(job(array=True))
    assert "--nodes=1" in options(made)
    assert "--array=0-3" in options(made)
    assert "--output='/shared/job 1/slurm-%A_%a.out'" in options(made)
    assert "export PET_RDZV_ID=$SLURM_ARRAY_JOB_ID" in made
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' in made


@pytest.mark.parametrize("cpus", ["--cpus-per-task=8", "-c 8"])
def test_slurm_script_takes_whole_nodes_unless_cpus_are_given(cpus):
    assert "--exclusive" in options(script(job(array=True, options=["--comment=c"])))
    assert "--exclusive" not in options(script(job(options=[cpus])))


@pytest.mark.parametrize(
    ("running", "endpoint"),
    [
        ("2026-11-17T12:00:01 n1", "n1:29434"),
        ("2026-11-17T12:00:09 n1\n2026-11-17T12:00:01 n7", "n7:29434,n1:29434"),
        ("\n".join(f"2026-11-17T12:00:0{n} n{n}" for n in range(5)), "n0:29434,n1:29434,n2:29434"),
    ],
)
def test_the_tasks_of_an_array_find_each_other(tmp_path, running, endpoint):
    """The script's own lines, with a squeue that shows these tasks, once it answers."""
    squeue = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; exit 1; }}"
    done = run(
        tmp_path,
        job(array=True, finds_tasks=True, directory=str(tmp_path)),
        squeue=f"{squeue}\ncat <<'END'\n{running}\nEND",
        srun="echo endpoint=$PET_RDZV_ENDPOINT",
        sleep="",
        SLURM_ARRAY_JOB_ID="1034",
    )
    told = "squeue shows no task of job 1034: asking again in 5 s."
    assert done.stdout.splitlines() == [told, f"endpoint={endpoint}"], done.stderr
    assert "squeue" not in script(job(array=True))


def test_a_task_that_starts_after_the_job_has_failed_does_not_start_it_again(tmp_path):
    """It has only waited for its node. Otherwise each task would fail once more."""
    (tmp_path / "failed").write_text("64")
    done = run(tmp_path, job(array=True, directory=str(tmp_path)), srun="echo started")
    assert done.returncode == 64
    assert "The job has failed: this task does not start it again." in done.stdout
    assert "started" not in done.stdout


def test_a_job_has_more_time_than_notice():
    assert doctest.testmod(slurm_script).failed == 0
    with pytest.raises(ConfigError, match="is not longer than --notice 120 s"):
        script(job(time="2"))
    script(job(time="3"))


def test_a_directory_is_not_a_pattern_of_slurm():
    assert "--output=/a%%j/slurm-%j.out" in options(script(job(directory="/a%j")))


def test_every_start_has_a_witness_of_its_own():
    made = script(job(witness=True))
    assert 'PET_WITNESS="$TORCHELASTIC_JOB_DIR/witness-${SLURM_RESTART_COUNT:-0}"' in made
    assert "WITNESS" not in script(job())


def test_an_option_needs_its_dashes():
    for wrong in ("gpus=8", "--a\nrm -rf /"):
        with pytest.raises(ConfigError, match="is not an option of sbatch"):
            script(job(options=[wrong]))


@pytest.mark.parametrize(
    ("left", "srun", "code", "requeued"),
    [
        ("finished", 143, 0, False),
        ("finished", 0, 0, False),
        ("failed", 143, 64, False),
        ("", 143, 143, True),
        ("", 137, 137, True),
        ("", 171, 171, True),
        ("", 64, 64, False),
        ("", 1, 1, False),
    ],
)
def test_what_the_script_does_after_its_nodes(tmp_path, left, srun, code, requeued):
    """With stand-ins for srun and scontrol: what they do is in tests/process/test_slurm.py."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "failed").write_text("1")  # of an earlier start
    done = run(
        tmp_path,
        job(directory=str(tmp_path / "job")),
        srun=f'[ -z "{left}" ] || echo 64 > "$TORCHELASTIC_JOB_DIR/{left}"; exit {srun}',
        scontrol=f'echo "$*" > {tmp_path}/asked',
        SLURM_JOB_ID="7",
    )
    assert done.returncode == code, done
    asked = Path(tmp_path, "asked")
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if requeued else "")
