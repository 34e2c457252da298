"""The rendezvous that a command line selects, by table."""

from dataclasses import astuple

from tests.unit.cli.tables import not_refused, wrong
from torchelastic.cli.options.command_table import DISTRIBUTED_LAUNCH, DISTRIBUTED_RUN, RUN
from torchelastic.cli.options.launch_config import launch_config
from torchelastic.cli.options.parser import parse
from torchelastic.cli.options.rendezvous_rules import BackendChoice, arrange, patience
from torchelastic.config import OWN_ETCD

EVERY = (RUN, DISTRIBUTED_RUN, DISTRIBUTED_LAUNCH)
PRIVATE = BackendChoice("c10d")
ETCD = "--rdzv-backend etcd --rdzv-endpoint a"


def config_of(line, defaults=RUN, environ=None):
    return launch_config(parse(line.split(), defaults, environ or {}), {})


def backend_of(line, defaults, environ=None):
    parsed = parse(line.split(), defaults, environ or {})
    return arrange(parsed, parsed["nnodes"][1])


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


def test_variables_work_like_flags():
    # what Kubeflow's operator gives a job without elasticity
    environ = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
    }
    assert backend_of("", RUN, environ) == BackendChoice("static", "job-master-0:23456", 1)


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


def test_what_cannot_work_is_refused():
    assert not_refused(lambda defaults, line: config_of(line, defaults), REFUSED) == []


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


def test_job_ids():
    assert config_of("").run_id != config_of("").run_id
    first, second = (config_of(f"--nnodes 2 --rdzv-endpoint {host}") for host in ("a", "localhost"))
    assert first.run_id == second.run_id == "job-29400"
    assert config_of("--nnodes 2 --rdzv-endpoint a --rdzv-id none").run_id == "none"
    assert config_of("", environ={"PET_RDZV_ID": "x"}).run_id == "x"


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
    assert wrong(lambda line: astuple(patience(parse(line.split(), RUN, {}))), cases) == []


def test_what_is_ignored_is_noted():
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
