"""The TorchX component: a job of `torchx run` on this machine, and what other schedulers would get.

Slurm is a real cluster (`tests.slurm`). Dry runs show what TorchX hands to schedulers that are not
here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.ports import free_port
from tests.slurm import SlurmCluster

pytestmark = pytest.mark.needs("torchx")

TORCHX = [sys.executable, "-m", "torchx.cli.main", "run", "--workspace="]
TRAIN = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "has", *sys.argv[1:])
"""


def torchx(directory: Path, *args: str) -> tuple[int, str]:
    """Run `torchx run` for the component; return its exit code, and what it printed."""
    (directory / "train_me.py").write_text(TRAIN)
    scripts = str(Path(sys.executable).parent)
    environ = with_light_torch() | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(directory),
    }
    done = subprocess.run(
        [*TORCHX, *args],
        cwd=directory,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=110,
    )
    return done.returncode, done.stdout


def component(*args: str) -> list[str]:
    return ["torchelastic.torchx:elastic", "--script", "train_me.py", *args]


def test_two_replicas_run_to_the_end_with_a_secret_of_their_own(tmp_path):
    """Two agents, and TorchX itself, import."""
    flags = component("-j", "2x1", "--rdzv_port", str(free_port()), "--", "--lr", "0.1")
    code, printed = torchx(tmp_path, "-s", "local_cwd", *flags)
    assert code == 0, printed
    for replica in (0, 1):
        assert f"train_me/{replica} [torchelastic] TorchX local_cwd://" in printed
    for rank in (0, 1):
        assert f"rank {rank} of 2 has --lr 0.1" in printed
    (job,) = (tmp_path / "torchelastic-jobs").iterdir()
    assert {path.name for path in job.iterdir()} == {"secret", "finished"}
    assert (job / "secret").stat().st_mode & 0o777 == 0o600
    assert (job / "secret").read_text().strip() not in printed


def dry_run(directory: Path, scheduler: str, *args: str) -> str:
    code, printed = torchx(directory, "--dryrun", "-s", scheduler, *args)
    assert code == 0, printed
    assert "TORCHELASTIC_SECRET" not in printed
    return printed.partition("=== SCHEDULER REQUEST ===")[2]


def test_slurm_gets_one_agent_per_node(tmp_path):
    request = dry_run(tmp_path, "slurm", *component("-j", "2:3x8", "--gpu", "8", "--", "--lr", "1"))
    assert request.count(" torchelastic run -j 2:3x8 train_me.py --lr 1") == 3
    assert request.count("--gpus-per-task=8") == 3
    for replica in range(3):
        assert (
            "TORCHELASTIC_TORCHX_ENDPOINT=SLURM_JOB_NODELIST_HET_GROUP_0:29400,"
            f"TORCHELASTIC_TORCHX_REPLICA={replica}," in request
        )
    assert 'TORCHX_JOB_ID=slurm://torchx/"$SLURM_JOB_ID"' in request


@pytest.mark.needs("slurm")
def test_a_job_on_a_real_slurm_cluster(tmp_path):
    """A cluster of two nodes starts, and an agent on each: a heterogeneous job of Slurm's."""
    (tmp_path / "train_me.py").write_text(TRAIN)
    with SlurmCluster(2) as cluster:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        cluster.environ = with_light_torch(cluster.environ) | {"PATH": path}
        flags = component("-j", "2x1", "--cpu", "1", "--memMB", "0", "--", "--lr", "1")
        said = cluster.run(*TORCHX, "-s", "slurm", *flags, cwd=tmp_path)
        number = re.findall(r"slurm://torchx/(\d+)", said.stdout)[0]
        cluster.await_state(number, "COMPLETED")
    output = "".join(path.read_text() for path in sorted(tmp_path.glob("slurm-*")))
    for rank in (0, 1):
        assert f"rank {rank} of 2 has --lr 1" in output
    job = tmp_path / "torchelastic-jobs" / number
    assert {path.name for path in job.iterdir()} == {"secret", "finished"}
    assert (job / "secret").read_text().strip() not in output
    assert f"TorchX slurm://torchx/{number}: endpoint host2:29400" in output


@pytest.mark.needs("kubernetes")
def test_kubernetes_gets_the_job_directory_on_a_volume(tmp_path):
    import yaml

    shared = ["--job_dir", "/shared/jobs", "--mounts", "type=volume,src=claim,dst=/shared"]
    flags = component("-j", "2:3x8", "--max_retries", "9", *shared)
    request = dry_run(tmp_path, "kubernetes", "-cfg", "queue=training", *flags)
    job = yaml.safe_load(request.partition("\ntorchx ")[0])
    tasks = job["spec"]["tasks"]
    assert [task["minAvailable"] for task in tasks] == [1, 1, 0]
    assert [task["maxRetry"] for task in tasks] == [9, 9, 9]
    names = []
    for task in tasks:
        (container,) = task["template"]["spec"]["containers"]
        assert container["command"] == ["torchelastic", "run", "-j", "2:3x8", "train_me.py"]
        given = {each["name"]: each["value"] for each in container["env"]}
        assert given["TORCHELASTIC_JOB_DIR"] == f"/shared/jobs/{job['metadata']['name']}"
        assert "/shared" in [mount["mountPath"] for mount in container["volumeMounts"]]
        names.append(given["TORCHELASTIC_TORCHX_ENDPOINT"])
    first, *others = names
    assert first == "TORCHX_RANK0_HOST:29400"
    assert set(others) == {"VC_TRAINME_0_HOSTS:29400"}


@pytest.mark.parametrize("scheduler", ["local_docker", "lsf"])
def test_other_schedulers_take_it(tmp_path, scheduler):
    request = dry_run(tmp_path, scheduler, *component("-j", "2x4"))
    assert request.count("TORCHELASTIC_TORCHX_ENDPOINT") == 2
    assert "TORCHX_RANK0_HOST:29400" in request


def test_a_wrong_shape_is_refused(tmp_path):
    code, printed = torchx(tmp_path, "--dryrun", "-s", "local_cwd", *component("-j", "4:2x1"))
    assert code != 0
    assert "'4:2x1' is not a valid shape: write [MIN:]NODESxPROCS" in printed


def test_the_component_does_not_import_torch():
    program = "import sys, torchelastic.torchx; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
