"""From flags, the platform and the defaults to the job, by table."""

import dataclasses

import pytest

from tests.unit.cli.tables import not_refused, wrong
from tests.unit.cli.test_parser import example
from tests.unit.cluster import environments as given
from torchelastic.cli.command_table import DISTRIBUTED_LAUNCH, DISTRIBUTED_RUN, RUN
from torchelastic.cli.flags import FLAGS, fields_of
from torchelastic.cli.parser import parse
from torchelastic.cli.planned_job import (
    BackendChoice,
    choose_rendezvous,
    entry_of,
    launch_config,
    shape_of,
    times,
)
from torchelastic.cluster.detect import detect
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.config import OWN_ETCD, Entry, LaunchConfig, Std


def config_of(line="", environ=None, command=RUN):
    environ = environ or {}
    return launch_config(parse(line.split(), command, environ), environ)


def test_without_flags_the_job_is_the_default_one():
    config = config_of()
    assert dataclasses.replace(config, run_id="") == LaunchConfig()
    assert config.run_id.startswith("job-")


#: Where a flag means another field than the one of its name, or two flags one.
FIELDS = {
    "--rdzv-id x": {"run_id": "x"},
    "--standalone --rdzv-id x": {"run_id": "x"},
    "--no-zygote": {"zygote": False},
    "--preload a --preload b": {"preload": ("a", "b")},
    "-r 3 -t 12:1": {"redirects": Std.ALL, "tee": {12: Std.OUT}},
    "--metrics-address 9400": {"metrics_address": "127.0.0.1:9400"},
    "--metrics-address [::]:0": {"metrics_address": "[::]:0"},
    "--rdzv-conf is_host=1": {"rdzv_configs": {"is_host": "1"}, "notes": ()},
    "--rdzv-secret-file a": {"rdzv_secret_file": "a"},
    "--rdzv-conf secret_file=a": {"rdzv_secret_file": "a", "notes": ()},
    "--rdzv-secret-file b --rdzv-conf secret_file=a": {"rdzv_secret_file": "b"},
    "--rdzv-tls-cert a --rdzv-tls-key b --rdzv-tls-ca c": {
        "rdzv_tls_cert": "a",
        "rdzv_tls_key": "b",
        "rdzv_tls_ca": "c",
    },
}
#: Fields that are made of several flags.
ARRANGED = {"rdzv_endpoint", "rdzv_backend", "node_rank"}
ARRANGED |= {"rdzv_tls_cert", "rdzv_tls_key", "rdzv_tls_ca"}


def test_flags_set_fields():
    def fields(line):
        return {name: getattr(config_of(line), name) for name in FIELDS[line]}

    assert wrong(fields, FIELDS.items()) == []
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    of_their_name = [flag for flag in FLAGS if flag.dest in fields - ARRANGED]
    said = {flag.dest: parse(example(flag)[0], RUN, {}) for flag in of_their_name}
    cases = [(dest, parsed[dest]) for dest, parsed in said.items()]
    assert len(cases) > 30
    assert wrong(lambda dest: getattr(launch_config(said[dest], {}), dest), cases) == []


def test_variables_that_are_no_flags():
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}
    assert config_of(environ=environ).log_line_prefix_template == "[${rank}]"
    assert config_of(environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4"}).shutdown_timeout == 4


def shape(line, environ):
    return dataclasses.astuple(shape_of(parse(line.split(), RUN, environ)))


def test_shapes():
    cases = [
        ("", {}, (1, 1, 1)),
        ("--nnodes 2:4 --nproc 8", {}, (2, 4, 8)),
        ("-j 2x8", {}, (2, 2, 8)),
        ("-j 1:4x8", {}, (1, 4, 8)),
        ("-j 2x8", {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "4"}, (2, 2, 8)),
        ("--nnodes 3", {"PET_SHAPE": "2x8"}, (3, 3, 8)),
        ("--nproc-per-node auto", {"PET_SHAPE": "2x8"}, (2, 2, "auto")),
        ("--standalone --nnodes 1:4", {}, (1, 1, 1)),
    ]
    assert wrong(shape, cases) == []
    contradictions = [
        ("-j 2x8 --nnodes 2", {}, "-j and --nnodes set the same thing"),
        ("-j 2x8 --nproc 8", {}, "-j and --nproc-per-node set the same thing"),
        ("", {"PET_SHAPE": "2x8", "PET_NNODES": "2"}, "-j and --nnodes set the same thing"),
        ("--standalone --nnodes 2", {}, "--standalone is for one node, but the job needs 2"),
    ]
    assert not_refused(shape, contradictions) == []


def test_flag_with_other_name_sets_the_fields_it_declares():
    """`test_flags_set_fields` has the others."""
    lines = {
        "shape": "--shape 2:3x2",
        "nnodes": "--nnodes 2:3",
        "rdzv_id": "--rdzv-id x",
        "rdzv_conf": "--rdzv-conf is_host=1",
        "no_zygote": "--no-zygote",
        "no_log_copy": "--no-log-copy",
    }
    assert set(lines) == {f.dest for f in FLAGS if fields_of(f) not in ((), (f.dest,))}
    before = dataclasses.asdict(config_of("--rdzv-endpoint n1:1 --rdzv-id job"))
    for flag in FLAGS:
        if not (line := lines.get(flag.dest)):
            continue
        after = dataclasses.asdict(config_of(f"--rdzv-endpoint n1:1 --rdzv-id job {line}"))
        changed = tuple(name for name in before if after[name] != before[name])
        assert changed == fields_of(flag), line


def entry(line):
    return entry_of(parse(line.split(), RUN, {}))


def test_entries():
    cases = [
        ("a.py --x 1", Entry("script", "a.py", ("--x", "1"))),
        ("-m a.b -v", Entry("module", "a.b", ("-v",))),
        ("--no-python bash -c true", Entry("program", "bash", ("-c", "true"))),
        ("--run-path /a.py", Entry("script", "/a.py")),
        ("--run-path --no-python /a.py", Entry("script", "/a.py")),
        ("--use-env a.py x", Entry("script", "a.py", ("x",))),
        ("--no-use-env a.py x", Entry("script", "a.py", ("--local-rank=${local_rank}", "x"))),
        ("a.py ${local_rank}", Entry("script", "a.py", ("${local_rank}",))),
    ]
    assert wrong(entry, cases) == []
    refused = [
        ("", "No script given: name one, as in torchelastic run train.py."),
        ("-m --no-python a", "--module and --no-python exclude each other"),
    ]
    assert not_refused(entry, refused) == []


def test_flags_of_bagua_are_named_once_and_ignored():
    line = (
        "--bagua_service_port 1 --default_bucket_size=2 --autotune_level 1 "
        "--autotune_max_samples 3 --autotune_sampling_confidence_time 0.5 "
        "--autotune_warmup_time 1.5 --is_output_autotune_log --enable_bagua_net "
        "--bagua-net_switch_on"
    )
    (note,) = config_of(line, command=DISTRIBUTED_RUN).notes
    assert note.startswith("Ignored flags: ")
    assert all(flag.name in note for flag in FLAGS if flag.ignored)


EVERY = (RUN, DISTRIBUTED_RUN, DISTRIBUTED_LAUNCH)
PRIVATE = BackendChoice("c10d")
ETCD = "--rdzv-backend etcd --rdzv-endpoint a"


def backend_of(line, defaults, environ=None):
    parsed = parse(line.split(), defaults, environ or {})
    return choose_rendezvous(parsed, parsed["nnodes"][1])


MEETINGS = [
    ("", PRIVATE),
    ("--standalone", PRIVATE),
    ("--standalone --rdzv-backend c10d --rdzv-endpoint a:1", PRIVATE),
    ("--standalone --rdzv-backend etcd --rdzv-endpoint a:1", BackendChoice("etcd", OWN_ETCD)),
    ("--rdzv-backend c10d", PRIVATE),
    ("--rdzv-backend c10d --rdzv-endpoint a", BackendChoice("c10d", "a")),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1", BackendChoice("c10d", "a:1")),
    (f"{ETCD} --rdzv-id x", BackendChoice("etcd", "a")),
    ("--rdzv-backend etcd-v3 --rdzv-endpoint a:1", BackendChoice("etcd-v3", "a:1")),
    # static as torchrun has it
    ("--rdzv-backend static", PRIVATE),
    ("--node-rank 0", PRIVATE),
    ("--master-addr a", PRIVATE),
    ("--master-port 12", BackendChoice("static", "127.0.0.1:12", 0)),
    ("--master-addr a --master-port 12", BackendChoice("static", "a:12", 0)),
    ("--nnodes 2 --node-rank 1", BackendChoice("static", "127.0.0.1:29500", 1)),
    ("--nnodes 2 --master-addr a", BackendChoice("static", "a:29500", 0)),
    ("--nnodes 2 --master-addr [::1] --node-rank 1", BackendChoice("static", "[::1]:29500", 1)),
    ("--nnodes 2 --node-rank 1 --rdzv-endpoint a:1", BackendChoice("static", "a:1", 1)),
    ("--nnodes 2 --rdzv-backend static --rdzv-endpoint a:1", BackendChoice("static", "a:1", 0)),
    # a backend that was named stays
    (
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a --node-rank 1",
        BackendChoice("c10d", "a"),
    ),
]
#: Where the commands differ: an endpoint alone means the command's own backend.
OWN_BACKEND = [
    (RUN, BackendChoice("c10d", "a:1")),
    (DISTRIBUTED_RUN, BackendChoice("static", "a:1", 0)),
    (DISTRIBUTED_LAUNCH, BackendChoice("etcd", "a:1")),
]


def test_the_rendezvous_that_a_command_line_selects():
    cases = [(line, defaults, meant) for defaults in EVERY for line, meant in MEETINGS]
    own = [("--nnodes 2 --rdzv-endpoint a:1", *case) for case in OWN_BACKEND]
    assert wrong(backend_of, cases + own) == []


REFUSED = [
    (RUN, "--rdzv-backend etcd", "needs --rdzv-endpoint HOST:PORT, the address of the etcd"),
    (RUN, "--rdzv-backend etcd --rdzv-endpoint a:0 --nnodes 2 --rdzv-id x", "ith port 0"),
    (DISTRIBUTED_LAUNCH, "--nnodes 2 --rdzv-endpoint a:1", "needs an id"),
    (RUN, f"{ETCD} --rdzv-conf protocol=http,cert=a", "cert cannot be used with protocol=http"),
    (RUN, f"{ETCD} --rdzv-conf protocol=ftp", "use http or https"),
    (RUN, f"{ETCD} --rdzv-conf etcd_prefix=/", "etcd_prefix must be a key"),
    (RUN, "--rdzv-backend mine", "nknown rendezvous backend 'mine': use c10d, static"),
    (RUN, "--nnodes 2", "needs --rdzv-endpoint"),
    (DISTRIBUTED_RUN, "--nnodes 1:2", "needs --rdzv-endpoint"),
    (DISTRIBUTED_LAUNCH, "--nnodes 2", "needs --rdzv-endpoint"),
    (RUN, "--nnodes 2 --rdzv-endpoint localhost:0", "needs --rdzv-endpoint"),
    (RUN, "--node-rank 1", "--node-rank 1 is too large for a job of 1 node"),
    (RUN, "--nnodes 2 --node-rank 2", "--node-rank 2 is too large for a job of 2 node"),
    (RUN, "--rdzv-conf last_call_timeout=soon", "key last_call_timeout: 'soon' is not a valid"),
    (RUN, "--rdzv-conf join_timeout=-1", "key join_timeout: '-1' is not a valid"),
    (RUN, "--rdzv-conf keep_alive_interval=0", "lease must be "),
    (RUN, "--rdzv-conf is_host=perhaps", "--rdzv-conf is_host 'perhaps' is neither yes nor"),
]


def test_impossible_rendezvous_is_refused():
    assert not_refused(lambda command, line: config_of(line, command=command), REFUSED) == []


def test_ports():
    cases = [
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", ""),
        ("--master-port 0", ""),
        ("--nnodes 2 --rdzv-endpoint a", "a:29400"),
        ("--nnodes 2 --rdzv-backend static --rdzv-endpoint a", "a:29500"),
        (ETCD, "a:2379"),
        ("--rdzv-backend etcd-v2 --rdzv-endpoint a:1", "a:1"),
        ("--rdzv-backend etcd --rdzv-endpoint a,[::1]:1", "a:2379,[::1]:1"),
        ("--rdzv-backend etcd --rdzv-endpoint a:0", OWN_ETCD),
    ]
    assert wrong(lambda line: config_of(line).rdzv_endpoint, cases) == []


def test_times():
    both = "--rdzv-conf last_call_timeout=7,join_timeout=60 --settle 2 --wait-for-nodes 0"
    cases = [
        ("", (1, 3, 3600)),
        ("--rdzv-conf last_call_timeout=7", (7, 3, 3600)),
        ("--rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=2", (1, 2, 3600)),
        ("--rdzv-conf keep_alive_interval=1", (1, 3, 3600)),
        ("--rdzv-conf keep_alive_max_attempt=2", (1, 10, 3600)),
        ("--rdzv-conf join_timeout=60", (1, 3, 60)),
        ("--rdzv-conf timeout=90", (1, 3, 90)),
        ("--rdzv-conf timeout=90,join_timeout=60", (1, 3, 60)),
        (both, (2, 3, 0)),
        ("--rdzv-conf keep_alive_interval=9 --lease 4", (1, 4, 3600)),
    ]
    assert wrong(lambda line: tuple(times(parse(line.split(), RUN, {})).values()), cases) == []


def test_ignored_flags_and_keys_are_noted():
    cases = [
        ("--rdzv-conf last_call_timeout=1,is_host=1,join_timeout=5", ""),
        (
            "--rdzv-conf read_timeout=1,close_timeout=2,store_type=file",
            "Ignored keys of --rdzv-conf: close_timeout, read_timeout, store_type.",
        ),
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a --node-rank 1 --master-addr b",
            "Ignored --node-rank, --master-addr: only a static rendezvous uses them.",
        ),
        ("--node-rank 0 --master-addr localhost", ""),
        (f"{ETCD} --rdzv-conf etcd_prefix=/torchelastic/p2p,protocol=http", ""),
    ]
    assert wrong(lambda line: "|".join(config_of(line).notes), cases) == []


def config_on(line, environ, files=None):
    """The job on the platform of this environment."""
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
    made = config_on(line, environ, HOSTS)
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
    notes = config_on(line, environ).notes
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
    made = config_on(line, environ)
    assert (" ".join(made.signals_to_handle), made.shutdown_timeout) == (signals, seconds)


def test_the_incarnation_is_the_platforms():
    assert config_on("", given.SLURM).incarnation == "1234.0-0-2"
    assert config_on("", {}).incarnation == ""
    assert config_on("", {"POD_UID": "of an ElasticJob"}).incarnation == "of an ElasticJob"


def test_a_node_is_scheduled_if_the_platform_gave_its_id_or_started_its_pod():
    assert config_on("", given.SLURM).scheduled
    assert config_on("--rdzv-id=mine", {"POD_UID": "of an ElasticJob"}).scheduled
    assert not config_on("--rdzv-id=mine", given.SLURM).scheduled
    assert not config_on("--rdzv-id=mine", {}).scheduled


def test_the_jobs_directory_has_the_secret(tmp_path):
    made = JobDirectory.create(tmp_path / "job")
    environ = {"TORCHELASTIC_JOB_DIR": str(made.path)}
    config = config_on("", environ)
    assert (config.job_dir, config.rdzv_secret_file) == (str(made.path), str(made.secret))
    assert config_on("--rdzv-secret-file s", environ).rdzv_secret_file == "s"
    named = environ | {"TORCHELASTIC_SECRET": "x"}
    assert config_on("", named).rdzv_secret_file is None
