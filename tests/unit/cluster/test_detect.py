"""Which platform is found, and what it says, by table."""

import dataclasses

import pytest

from tests.unit.cluster import environments as given
from torchelastic.cluster.detect import detect
from torchelastic.cluster.slurm import hosts


def found(environ, files=None):
    """Return what was found without signals and sources, which have their own tests."""
    seen = detect(environ, (files or {}).get)
    if seen is None:
        return None
    nodes = (seen.min_nodes, seen.max_nodes)
    return (f"{seen.platform} {seen.job}", seen.run_id, nodes, ",".join(seen.endpoints), seen.node)


UUID = given.RUNAI["JOB_UUID"]
TASK = given.SKYPILOT["SKYPILOT_TASK_ID"]
ENDPOINT = "imagenet-2.workers.default.svc.cluster.local".replace("-2", "-0") + ":29400"
UNKNOWN = (None, None)


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        (
            given.SLURM,
            {},
            ("Slurm job 1234", "1234", (4, 4), "n1:29400,n2:29400,n3:29400", "1234.0-0-2"),
        ),
        (
            given.SLURM | {"SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "2"},
            {},
            ("Slurm job 1234", "1234.3", (4, 4), "n1:29400,n2:29400,n3:29400", "1234.3-2-2"),
        ),
        (
            given.SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n3"},
            {},
            ("Slurm job 1234", "1234", (1, 1), "n3:29400", "1234.0-0-2"),
        ),
        (given.SLURM_SHELL, {}, None),
        (
            given.TORCHX_LOCAL,
            {},
            (
                "TorchX local_cwd://torchx/train-q69j66rtsv053",
                "train-q69j66rtsv053",
                UNKNOWN,
                "localhost:29400",
                "",
            ),
        ),
        (
            given.TORCHX_SLURM,
            {},
            ("TorchX slurm://torchx/1234", "1234", UNKNOWN, "n1:29400", ""),
        ),
        (
            given.TORCHX_VOLCANO,
            {},
            (
                "TorchX kubernetes://torchx/train-vmp2",
                "train-vmp2",
                UNKNOWN,
                "train-vmp2-train-0-0.train-vmp2:29400",
                "",
            ),
        ),
        (
            given.TORCHX_VOLCANO_0,
            {},
            (
                "TorchX kubernetes://torchx/train-vmp2",
                "train-vmp2",
                UNKNOWN,
                "train-vmp2-train-0-0:29400",
                "",
            ),
        ),
        (
            # Only replica 0 may stand in for a host that is not known.
            given.TORCHX_VOLCANO | {"VC_TRAIN_0_HOSTS": ""},
            {},
            ("TorchX kubernetes://torchx/train-vmp2", "train-vmp2", UNKNOWN, "", ""),
        ),
        (given.SLURM_BATCH, {}, ("Slurm job 1234", "", UNKNOWN, "", "")),
        (given.SLURM_BATCH | {"SLURM_JOB_NUM_NODES": "1"}, {}, None),
        (given.RAY_JOB, {}, ("Ray job raysubmit_1a2b", "", UNKNOWN, "", "")),
        (given.RAY_JOB | {"RAY_JOB_CONFIG_JSON_ENV_VAR": "["}, {}, None),
        (
            given.PYTORCHJOB,
            {},
            ("Kubernetes PyTorchJob imagenet", "imagenet", (1, 3), "imagenet-worker-0:23456", ""),
        ),
        (
            given.PYTORCHJOB | {"PET_RDZV_ID": "mine", "POD_UID": "c0de"},
            {},
            ("Kubernetes PyTorchJob imagenet", "mine", (1, 3), "imagenet-worker-0:23456", "c0de"),
        ),
        (
            given.PYTORCHJOB_FIXED,
            {},
            ("Kubernetes PyTorchJob imagenet", "imagenet", (3, 3), "", ""),
        ),
        (
            given.RUNAI_DISTRIBUTED,
            {},
            ("Run:ai PyTorchJob imagenet", UUID, (1, 3), "imagenet-worker-0:23456", ""),
        ),
        (given.PYTORCHJOB | {"PET_NNODES": "many"}, {}, None),
        (
            given.TRAINJOB,
            {},
            (
                "Kubernetes TrainJob imagenet",
                "imagenet",
                (4, 4),
                "imagenet-node-0-0.imagenet:29500",
                "",
            ),
        ),
        (
            given.INDEXED_JOB,
            {},
            ("Kubernetes Indexed Job imagenet", "imagenet", UNKNOWN, "", ""),
        ),
        (
            given.INDEXED_JOB_WITH_IDS,
            {"/etc/hosts": given.HOSTS},
            ("Kubernetes Indexed Job imagenet", "8f7d", UNKNOWN, ENDPOINT, "c0de"),
        ),
        (
            given.INDEXED_JOB_WITH_IDS | {"JOB_ENDPOINTS": "2"},
            {"/etc/hosts": given.HOSTS},
            (
                "Kubernetes Indexed Job imagenet",
                "8f7d",
                UNKNOWN,
                f"{ENDPOINT},{ENDPOINT.replace('-0', '-1')}",
                "c0de",
            ),
        ),
        (
            given.VOLCANO,
            {},
            ("Volcano job imagenet", "imagenet", (3, 3), "imagenet-master-0.imagenet:23456", ""),
        ),
        (
            given.VOLCANO_WITHOUT_PYTORCH,
            {},
            ("Volcano job imagenet", "imagenet", UNKNOWN, "imagenet-worker-0.imagenet:29400", ""),
        ),
        (
            given.VOLCANO_WITHOUT_PYTORCH,
            {"/etc/volcano/worker.host": "imagenet-worker-5.imagenet\n"},
            ("Volcano job imagenet", "imagenet", UNKNOWN, "imagenet-worker-5.imagenet:29400", ""),
        ),
        (given.RUNAI, {}, ("Run:ai job imagenet", UUID, UNKNOWN, "", "")),
        (given.SKYPILOT, {}, (f"SkyPilot task {TASK}", TASK, (2, 2), "10.0.0.4:29400", "")),
        # A notebook in a pod, a shell without any platform, and half an environment.
        (given.POD | {"HOSTNAME": "jupyter-ada"}, {}, None),
        ({}, {}, None),
        ({"SLURM_JOB_ID": "1234"}, {}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, {}, None),
        ({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "imagenet-0"}, {}, None),
        (given.PYTORCHJOB | {"KUBERNETES_SERVICE_HOST": ""}, {}, None),
        ({"SKYPILOT_NUM_NODES": "2"}, {}, None),
        ({"JOB_UUID": "x"}, {}, None),
    ],
)
def test_platform_states_job_nodes_and_endpoints(environ, files, expected):
    assert found(environ, files) == expected


def test_every_value_has_a_source():
    for name, environ in vars(given).items():
        if name.isupper() and isinstance(environ, dict) and (seen := detect(environ, lambda _: "")):
            sourced = {"run_id", "max_nodes", "endpoints", "node"}
            said = {field for field in sourced if getattr(seen, field)}
            assert said == set(seen.sources), name
            variables = ", ".join(seen.sources.values()).split(", ")
            of_slurm = {"SLURM_RESTART_COUNT"}  # set from the first requeue on
            assert set(variables) <= {*environ, "", *of_slurm}, name


@pytest.mark.parametrize(
    ("seconds", "grace"), [(None, 30.0), ("90", 90.0), ("", 30.0), ("soon", 30.0)]
)
def test_a_pod_may_say_how_long_it_has(seconds, grace):
    told = {} if seconds is None else {"POD_GRACE_SECONDS": seconds}
    for environ in (given.INDEXED_JOB, given.PYTORCHJOB, given.TRAINJOB, given.VOLCANO):
        assert detect(environ | told, {}.get).grace == grace


def test_a_script_of_sbatch_without_srun_is_told_what_it_misses():
    seen = detect(given.SLURM_BATCH, {}.get)
    assert seen.advice == (
        "Slurm job 1234 has 4 nodes, but this process was started without srun and uses only its "
        "own: write `srun --ntasks-per-node=1 torchelastic run ...` to use all."
    )
    assert dataclasses.replace(seen, advice="", job="").sources == {}


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[001-003,007],m5", "n001 n002 n003 n007 m5"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a1,b2,c3", "a1 b2 c3"),
        ("rack[1-2]-n[1-2]", "rack1-n1 rack1-n2 rack2-n1 rack2-n2"),
        ("n[1,3]-ib", "n1-ib n3-ib"),
        ("gpu-a-[01-02].site.edu,login", "gpu-a-01.site.edu gpu-a-02.site.edu login"),
        ("", ""),
    ],
)
def test_node_lists(nodelist, expected):
    assert hosts(nodelist) == expected.split()


@pytest.mark.parametrize(
    ("environ", "directory", "grace", "signals_all"),
    [
        (given.TORCHX_LOCAL, "torchelastic-jobs/train-q69j66rtsv053", None, False),
        (given.TORCHX_SLURM, "torchelastic-jobs/1234", 30.0, True),
        (given.TORCHX_VOLCANO, "", 30.0, False),
    ],
)
def test_torchx_follows_the_scheduler_below_it(environ, directory, grace, signals_all):
    """Replicas that share a directory keep the job there; Slurm signals their workers, too."""
    seen = detect(environ, {}.get)
    assert seen is not None
    assert (seen.job_dir, seen.grace, seen.signals_all) == (directory, grace, signals_all)
