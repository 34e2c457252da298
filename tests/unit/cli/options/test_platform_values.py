"""What a job takes from the platform, and what flags and variables win over, by table."""

import pytest

from tests.unit.cluster import environments as given
from torchelastic.cli.options.command_table import RUN
from torchelastic.cli.options.launch_config import launch_config
from torchelastic.cli.options.parser import parse
from torchelastic.cluster.detect import detect
from torchelastic.cluster.job_directory import JobDirectory


def config_of(line, environ, files=None):
    found = detect(environ, (files or {}).get)
    return launch_config(parse(line.split(), RUN, environ), environ, found=found)


SLURM_ENDPOINTS = "n1:29400,n2:29400,n3:29400"
HOST = "imagenet-0.workers.default.svc.cluster.local:29400"
HOSTS = {"/etc/hosts": given.HOSTS}


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("", given.SLURM, (4, 4, SLURM_ENDPOINTS, "1234")),
        ("--nnodes 2:4", given.SLURM, (2, 4, SLURM_ENDPOINTS, "1234")),
        ("-j 2:4x8", given.SLURM, (2, 4, SLURM_ENDPOINTS, "1234")),
        ("--rdzv-endpoint a:1", given.SLURM, (4, 4, "a:1", "1234")),
        ("--rdzv-id x", given.SLURM, (4, 4, SLURM_ENDPOINTS, "x")),
        ("", given.SLURM | {"PET_RDZV_ID": "x"}, (4, 4, SLURM_ENDPOINTS, "x")),
        ("", given.SLURM | {"PET_NNODES": "3"}, (3, 3, SLURM_ENDPOINTS, "1234")),
        ("--nnodes 1", given.SLURM, (1, 1, "", "1234")),
        ("--standalone", given.SLURM, (1, 1, "", "job-")),
        ("--rdzv-backend etcd --rdzv-endpoint e", given.SLURM, (4, 4, "e:2379", "1234")),
        ("--master-addr a --node-rank 1", given.SLURM, (4, 4, "a:29500", "1234")),
        # Shells and scripts on one node train on one node.
        ("", given.SLURM_BATCH, (1, 1, "", "job-")),
        ("", given.SLURM_SHELL, (1, 1, "", "job-")),
        ("", given.POD, (1, 1, "", "job-")),
        ("", given.RUNAI, (1, 1, "", given.RUNAI["JOB_UUID"])),
        ("", given.PYTORCHJOB, (1, 3, "imagenet-worker-0:23456", "imagenet")),
        ("--nnodes 2:3", given.PYTORCHJOB, (2, 3, "imagenet-worker-0:23456", "imagenet")),
        ("", given.PYTORCHJOB_FIXED, (3, 3, "imagenet-master-0:23456", "imagenet")),
        ("", given.TRAINJOB, (4, 4, "imagenet-node-0-0.imagenet:29500", "imagenet")),
        ("--nnodes 2:4", given.TRAINJOB, (2, 4, "imagenet-node-0-0.imagenet:29500", "imagenet")),
        ("", given.INDEXED_JOB, (1, 1, "", "imagenet")),
        ("--nnodes 2:4", given.INDEXED_JOB, (2, 4, HOST, "imagenet")),
        ("", given.VOLCANO, (3, 3, "imagenet-master-0.imagenet:23456", "imagenet")),
        ("", given.SKYPILOT, (2, 2, "10.0.0.4:29400", given.SKYPILOT["SKYPILOT_TASK_ID"])),
    ],
)
def test_a_flag_wins_then_a_variable_then_the_platform(line, environ, expected):
    made = config_of(line, environ, HOSTS)
    run_id = "job-" if made.run_id.startswith("job-") else made.run_id
    assert (made.min_nodes, made.max_nodes, made.rdzv_endpoint, run_id) == expected


@pytest.mark.parametrize(
    ("line", "environ", "note"),
    [
        (
            "--nnodes 2:4",
            given.SLURM,
            f"Slurm job 1234: endpoint {SLURM_ENDPOINTS} (SLURM_STEP_NODELIST), run id 1234 "
            "(SLURM_JOB_ID), leaves on SIGTERM or SIGUSR1 with 30 s.",
        ),
        (
            "--rdzv-endpoint a:1",
            given.SLURM | {"SLURM_STEP_NUM_TASKS": "2"},
            "Slurm job 1234: nodes 2:2 (SLURM_STEP_NUM_TASKS), run id 1234 (SLURM_JOB_ID), "
            "leaves on SIGTERM or SIGUSR1 with 30 s.",
        ),
        (
            "",
            given.PYTORCHJOB,
            "Kubernetes PyTorchJob imagenet: nodes 1:3 (PET_NNODES), endpoint "
            "imagenet-worker-0:23456 (PET_RDZV_ENDPOINT), run id imagenet (PET_RDZV_ENDPOINT), "
            "leaves on SIGTERM with 30 s.",
        ),
        (
            "--rdzv-id x",
            given.SKYPILOT,
            "SkyPilot task {SKYPILOT_TASK_ID}: nodes 2:2 (SKYPILOT_NUM_NODES), endpoint "
            "10.0.0.4:29400 (SKYPILOT_NODE_IPS).",
        ),
        ("", given.POD | {"VC_TASK_INDEX": "0"}, "Volcano: leaves on SIGTERM with 30 s."),
        ("--standalone", given.SLURM, ""),
        ("", {}, ""),
    ],
)
def test_one_line_says_what_was_found_and_where(line, environ, note):
    notes = config_of(line, environ).notes
    assert (notes[0] if notes else "") == note.format(**environ)


@pytest.mark.parametrize(
    ("line", "environ", "signals", "seconds"),
    [
        ("", given.SLURM, "SIGTERM SIGINT SIGHUP SIGQUIT SIGUSR1", 28.0),
        ("--signals-to-handle SIGTERM", given.SLURM, "SIGTERM", 28.0),
        ("--shutdown-timeout 90", given.PYTORCHJOB, "SIGTERM SIGINT SIGHUP SIGQUIT", 90.0),
        ("", given.PYTORCHJOB, "SIGTERM SIGINT SIGHUP SIGQUIT", 28.0),
        ("", {}, "SIGTERM SIGINT SIGHUP SIGQUIT", 30.0),
    ],
)
def test_the_platforms_signals_and_grace_time(line, environ, signals, seconds):
    made = config_of(line, environ)
    assert (" ".join(made.signals_to_handle), made.shutdown_timeout) == (signals, seconds)


def test_the_incarnation_is_the_platforms():
    assert config_of("", given.SLURM).incarnation == "1234.0-0-2"
    assert config_of("", {}).incarnation == ""
    assert config_of("", {"POD_UID": "of an ElasticJob"}).incarnation == "of an ElasticJob"


def test_a_node_is_scheduled_if_the_platform_gave_its_id_or_started_its_pod():
    assert config_of("", given.SLURM).scheduled
    assert config_of("--rdzv-id=mine", {"POD_UID": "of an ElasticJob"}).scheduled
    assert not config_of("--rdzv-id=mine", given.SLURM).scheduled
    assert not config_of("--rdzv-id=mine", {}).scheduled


def test_the_jobs_directory_has_the_secret(tmp_path):
    made = JobDirectory.create(tmp_path / "job")
    environ = {"TORCHELASTIC_JOB_DIR": str(made.path)}
    config = config_of("", environ)
    assert (config.job_dir, config.rdzv_secret_file) == (str(made.path), str(made.secret))
    assert config_of("--rdzv-secret-file s", environ).rdzv_secret_file == "s"
    named = environ | {"TORCHELASTIC_SECRET": "x"}
    assert config_of("", named).rdzv_secret_file is None
