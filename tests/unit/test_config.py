"""The config: its parsers by table, its checks, and its JSON form."""

import dataclasses
import doctest
import json

import pytest

from torchelastic import config
from torchelastic.config import (
    Grow,
    LaunchConfig,
    Std,
    WorldSizes,
    default_run_id,
    format_endpoint,
    parse_endpoint,
    parse_endpoints,
    parse_nnodes,
    parse_shape,
    parse_truth,
    std_for,
)
from torchelastic.errors import ConfigError

FILLED = LaunchConfig(
    min_nodes=2,
    max_nodes=4,
    nproc_per_node=3,
    run_id="job",
    role="trainer",
    rdzv_backend="static",
    rdzv_endpoint="node1:1234",
    rdzv_configs={"is_host": "1"},
    rdzv_secret_file="secret",
    rdzv_tls_cert="cert.pem",
    rdzv_tls_key="key.pem",
    rdzv_tls_ca="ca.pem",
    node_rank=1,
    incarnation="1234.0-0-1",
    scheduled=True,
    job_dir="/shared/job",
    shared_signals=("SIGTERM",),
    local_addr="10.0.0.2",
    max_restarts=7,
    count_resizes=True,
    quorum="none",
    two_node_takeover=True,
    preemption="none",
    settle=2.5,
    lease=4,
    wait_for_nodes=0,
    grow=Grow("every", seconds=60),
    world_sizes=WorldSizes(allowed=(2, 4)),
    replica_size=1,
    preflight="nvidia-smi -q",
    snapshot_replicas=2,
    snapshot_bandwidth=1e9,
    zygote=False,
    preload=("numpy",),
    start_method="fork",
    virtual_local_rank=True,
    numa_binding="node",
    log_dir="logs",
    redirects={0: Std.OUT, 11: Std.ALL},
    tee=Std.ERR,
    log_copy=False,
    local_ranks_filter=frozenset({0, 2}),
    duplicate_stdout_filters=("a,b",),
    duplicate_stderr_filters=("c",),
    log_line_prefix_template="[${rank}]",
    event_log_handler="console",
    metrics_address="127.0.0.1:9400",
    metrics_token_file="/etc/token",
    health_port=29401,
    dashboard="127.0.0.1:29480",
    dashboard_token_file="/etc/page",
    signals_to_handle=("SIGTERM", "SIGUSR1"),
    shutdown_timeout=5,
    progress_timeout=90,
    straggler_threshold=2.5,
    replace_stragglers=True,
    monitor_interval=1,
    notes=("A sentence.",),
)


def test_doctests_hold():
    assert doctest.testmod(config).failed == 0


@pytest.mark.parametrize("made", [LaunchConfig(), FILLED], ids=["defaults", "every field set"])
def test_a_config_survives_json(made):
    assert LaunchConfig.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("scheme", ["", "file://", "s3://", "gs://", "abfs://", "az://"])
def test_a_witness_may_be_storage_with_an_atomic_create(scheme):
    assert LaunchConfig(witness=f"{scheme}/a").witness == f"{scheme}/a"


def test_every_field_is_set_in_the_filled_example():
    plain = LaunchConfig(witness="not together with what else is set")
    same = {
        item.name
        for item in dataclasses.fields(LaunchConfig)
        if getattr(plain, item.name) == getattr(FILLED, item.name)
    }
    assert same == set()


READ = {
    Std.from_str: {
        "0": Std.NONE,
        "3": Std.ALL,
        "0:1": {0: Std.OUT},
        "0:1,1:3": {0: Std.OUT, 1: Std.ALL},
        "127:2": {127: Std.ERR},
    },
    Grow.parse: {
        "any": Grow(),
        "every:60": Grow("every", seconds=60),
        "every:0.5": Grow("every", seconds=0.5),
        "after-checkpoint:/a:b": Grow("after-checkpoint", path="/a:b"),
    },
    parse_nnodes: {"1": (1, 1), "4": (4, 4), "1:4": (1, 4), "2:2": (2, 2)},
    parse_shape: {"2x8": (2, 2, 8), "1:4x8": (1, 4, 8), "1x1": (1, 1, 1)},
    parse_endpoint: {
        "node1": ("node1", 29400),
        "node1:80": ("node1", 80),
        "10.0.0.1:0": ("10.0.0.1", 0),
        "[::1]": ("::1", 29400),
        "[fe80::1]:65535": ("fe80::1", 65535),
    },
    parse_endpoints: {
        "node1": (("node1", 29400),),
        "node1,node2:80": (("node1", 29400), ("node2", 80)),
        "node1:80, node2:80": (("node1", 80), ("node2", 80)),
        "[fd00::1],10.0.0.1": (("fd00::1", 29400), ("10.0.0.1", 29400)),
        "node1,node2,node1:29400": (("node1", 29400), ("node2", 29400)),
    },
}


@pytest.mark.parametrize("parser", READ, ids=lambda parser: parser.__qualname__)
def test_words_are_read(parser):
    assert {text: parser(text) for text in READ[parser]} == READ[parser]


def test_parsed_value_prints_as_it_was_written():
    assert [str(grow) for grow in READ[Grow.parse].values()] == list(READ[Grow.parse])
    for endpoints in READ[parse_endpoints].values():
        spelled = ",".join(format_endpoint(*endpoint) for endpoint in endpoints)
        assert parse_endpoints(spelled) == endpoints


def test_allowed_worlds():
    some, multiples = WorldSizes.parse("8,1,4,2"), WorldSizes.parse("multiple:4")
    assert (some.allows(8), some.allows(7)) == (True, False)
    assert (multiples.allows(8), multiples.allows(3)) == (True, False)
    assert WorldSizes.parse("multiple:1").allows(5)


@pytest.mark.parametrize(
    ("parser", "told", "texts"),
    [
        (
            Std.from_str,
            "is not a valid set of streams",
            ["", "4", "-1", "0:4", "0:", ":1", "0:1,", "a:1"],
        ),
        (
            Grow.parse,
            "is not valid: write any",
            ["", "any:1", "every", "every:0", "every:x", "after-checkpoint:"],
        ),
        (
            WorldSizes.parse,
            "is not a valid set of world sizes",
            ["", "0", "0,1", "1,", "multiple:0", "multiple:", "-1", "a"],
        ),
        (
            parse_nnodes,
            "not a valid range of nodes",
            ["", "0", "-1", "4:1", "0:2", "1:2:3", "1:", ":2", "x", "1.5"],
        ),
        (
            parse_shape,
            "not a valid shape",
            ["", "2", "0x1", "1x0", "4:1x8", "2x", "x2", "2x8x1", "1:x2"],
        ),
        (
            parse_endpoint,
            "not a valid endpoint",
            ["", ":80", "a:b", "a:65536", "a:1:2", "a b:1", "::1", "http://a:1"],
        ),
        (parse_endpoint, r"in brackets, such as \[fd00::1\]:29400", ["fd00::1"]),
        (
            parse_endpoints,
            "not a valid endpoint",
            ["", ",", "node1,", ",node1", "node1,,node2", "a,b:c"],
        ),
        (parse_truth, "neither yes nor no", ["2"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_bad_texts_are_rejected(parser, told, texts):
    for text in texts:
        with pytest.raises(ConfigError, match=told):
            parser(text)


def test_streams_of_a_local_rank():
    assert std_for(Std.OUT, 5) == Std.OUT
    assert std_for({0: Std.ERR}, 0) == Std.ERR
    assert std_for({0: Std.ERR}, 1) == Std.NONE


def test_truth():
    assert all(parse_truth(word) for word in ("1", "true", "True", "YES", "y"))
    assert not any(parse_truth(word) for word in ("0", "false", "no", "N"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"witness": "/shared", "quorum": "none"}, "--witness and --quorum none both decide"),
        ({"witness": "/shared", "two_node_takeover": True}, "--two-node-takeover both decide"),
        *(
            ({"witness": f"{scheme}://a/b"}, f"'{scheme}' storage cannot create a key atomically")
            for scheme in ("sftp", "smb", "webhdfs", "hdfs", "ftp", "dbfs", "simplecache::s3")
        ),
        (
            {"witness": "/shared", "rdzv_backend": "etcd", "rdzv_endpoint": "etcd1"},
            "--witness and --rdzv-backend etcd both decide",
        ),
        ({"min_nodes": 0}, "not a valid range of nodes"),
        ({"min_nodes": 3, "max_nodes": 2}, "not a valid range of nodes"),
        ({"nproc_per_node": 0}, "nproc_per_node must be at least 1"),
        ({"max_restarts": -1}, "max_restarts must be 0 or more"),
        ({"settle": -1}, "settle must be 0 or more"),
        ({"wait_for_nodes": -1}, "wait_for_nodes must be 0 or more"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be 0 or more"),
        ({"lease": 0}, "lease must be more than 0"),
        ({"node_rank": 1}, "--node-rank 1 is not valid"),
        ({"node_rank": -1}, "--node-rank -1 is not valid"),
        ({"max_nodes": 2}, "needs --rdzv-endpoint"),
        ({"max_nodes": 2, "rdzv_endpoint": "localhost:0"}, "needs --rdzv-endpoint"),
        ({"rdzv_endpoint": "a:b"}, "not a valid endpoint"),
        ({"rdzv_configs": {"is_host": "maybe"}}, "is_host 'maybe' is neither"),
        ({"rdzv_configs": {"own_endpoint": "a"}}, "own_endpoint=a is not one of the endpoints"),
        (
            {"rdzv_endpoint": "a:1,b:2", "rdzv_configs": {"own_endpoint": "a:2"}},
            "own_endpoint=a:2 is not one of the endpoints .a:1,b:2.",
        ),
        (
            {"min_nodes": 2, "max_nodes": 3, "rdzv_endpoint": "a", "world_sizes": WorldSizes((1,))},
            "allows fewer workers than the job's minimum",
        ),
        ({"replica_size": 3, "nproc_per_node": 2}, "neither a divisor nor a multiple"),
        (
            {"min_nodes": 3, "max_nodes": 3, "rdzv_endpoint": "a", "replica_size": 2},
            "spans 2 nodes, and no multiple of that is between 3 and 3",
        ),
        ({"replica_size": 4, "nproc_per_node": 2}, "needs 2 nodes of 2 worker.*allows 1"),
        (
            {"replica_size": 2, "nproc_per_node": 2, "world_sizes": WorldSizes((2, 3))},
            "must list multiples of --replica-size 2",
        ),
        (
            {"nproc_per_node": 4, "world_sizes": WorldSizes((8, 16))},
            r"--world-sizes 8,16 cannot be met by 1 node\(s\) of 4 worker\(s\): change",
        ),
        ({"nproc_per_node": 4, "world_sizes": WorldSizes(multiple=8)}, "multiple:8 cannot be met"),
        ({"nproc_per_node": 4, "world_sizes": WorldSizes((3,))}, "3 cannot be met"),
        (
            {
                "max_nodes": 4,
                "rdzv_endpoint": "a",
                "replica_size": 2,
                "world_sizes": WorldSizes((6,)),
            },
            "6 cannot be met by 4 node.* in replicas of 2",
        ),
        (
            {
                **{"min_nodes": 3, "max_nodes": 4, "rdzv_endpoint": "a"},
                **{"replica_size": 2, "world_sizes": WorldSizes((2,))},
            },
            "allows fewer workers than the job's minimum",
        ),
        (
            {
                **{"min_nodes": 3, "max_nodes": 4, "rdzv_endpoint": "a", "nproc_per_node": 2},
                **{"replica_size": 4, "world_sizes": WorldSizes((4,))},
            },
            "4 cannot be met by 4 node",
        ),
    ],
)
def test_invalid_configs_are_rejected(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LaunchConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"nproc_per_node": 4, "world_sizes": WorldSizes((3, 4))},
        # Other nodes may have more workers.
        {"max_nodes": 2, "rdzv_endpoint": "a", "world_sizes": WorldSizes((16,))},
        {
            "max_nodes": 4,
            "rdzv_endpoint": "a",
            "replica_size": 2,
            "world_sizes": WorldSizes((4, 6)),
        },
    ],
)
def test_sizes_that_some_world_can_have(fields):
    LaunchConfig(**fields)


def test_an_endpoint_has_one_spelling():
    kept = {"": "", "node1": "node1:29400", "[::1]:5": "[::1]:5", "localhost:0": ""}
    assert {given: LaunchConfig(rdzv_endpoint=given).rdzv_endpoint for given in kept} == kept
    static = LaunchConfig(rdzv_backend="static", rdzv_endpoint="node1")
    assert static.rdzv_endpoint == "node1:29500"


def test_is_host():
    assert LaunchConfig().is_host is None
    assert LaunchConfig(rdzv_configs={"is_host": "true"}).is_host is True
    assert LaunchConfig(rdzv_configs={"is_host": "0"}).is_host is False


def test_own_endpoint():
    assert LaunchConfig().own_endpoint is None
    config = LaunchConfig(rdzv_endpoint="a:1,b:2", rdzv_configs={"own_endpoint": "b:2"})
    assert config.own_endpoint == ("b", 2)


def test_a_single_node_gets_a_unique_id_and_several_nodes_the_same():
    assert len({default_run_id(1, "") for _ in range(20)}) == 20
    spelled = ("node1:29400", "localhost:29400", "[::1]:29400", "node1.example.com")
    assert {default_run_id(4, endpoint) for endpoint in spelled} == {"job-29400"}
    assert default_run_id(4, "node1:1234") == "job-1234"


def test_the_forms_torchs_callers_use():
    config = LaunchConfig(
        1,
        1,
        2,
        signals_to_handle="SIGTERM,SIGUSR1",
        duplicate_stdout_filters=None,
        duplicate_stderr_filters=["loss"],
        shutdown_timeout=None,
    )
    assert config.nproc_per_node == 2
    assert config.signals_to_handle == ("SIGTERM", "SIGUSR1")
    assert config.duplicate_stdout_filters == ()
    assert config.duplicate_stderr_filters == ("loss",)
    assert config.shutdown_timeout == 30.0
