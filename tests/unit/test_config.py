"""Parsers of the config by table, its checks, and its way through JSON."""

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
    local_addr="10.0.0.2",
    max_restarts=7,
    count_resizes=True,
    quorum="none",
    two_node_takeover=True,
    settle=2.5,
    lease=4,
    wait_for_nodes=0,
    grow=Grow("every", seconds=60),
    world_sizes=WorldSizes(allowed=(2, 4)),
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
    local_ranks_filter=frozenset({0, 2}),
    duplicate_stdout_filters=("a,b",),
    duplicate_stderr_filters=("c",),
    log_line_prefix_template="[${rank}]",
    event_log_handler="console",
    metrics_address="127.0.0.1:9400",
    metrics_token_file="/etc/token",
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


def test_every_field_is_set_in_the_filled_example():
    plain = LaunchConfig()
    same = {
        item.name
        for item in dataclasses.fields(LaunchConfig)
        if getattr(plain, item.name) == getattr(FILLED, item.name)
    }
    assert same == set()


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", Std.NONE),
        ("3", Std.ALL),
        ("0:1", {0: Std.OUT}),
        ("0:1,1:3", {0: Std.OUT, 1: Std.ALL}),
        ("127:2", {127: Std.ERR}),
    ],
)
def test_streams_are_read(text, streams):
    assert Std.from_str(text) == streams


@pytest.mark.parametrize("text", ["", "4", "-1", "0:4", "0:", ":1", "0:1,", "a:1"])
def test_bad_streams_are_refused(text):
    with pytest.raises(ConfigError, match="does not name output streams"):
        Std.from_str(text)


def test_streams_of_a_local_rank():
    assert std_for(Std.OUT, 5) == Std.OUT
    assert std_for({0: Std.ERR}, 0) == Std.ERR
    assert std_for({0: Std.ERR}, 1) == Std.NONE


@pytest.mark.parametrize(
    ("text", "grow"),
    [
        ("any", Grow()),
        ("every:60", Grow("every", seconds=60)),
        ("every:0.5", Grow("every", seconds=0.5)),
        ("after-checkpoint:/a:b", Grow("after-checkpoint", path="/a:b")),
    ],
)
def test_grow_is_read_and_written(text, grow):
    assert Grow.parse(text) == grow
    assert str(grow) == text


@pytest.mark.parametrize("text", ["", "any:1", "every", "every:0", "every:x", "after-checkpoint:"])
def test_bad_grow_is_refused(text):
    with pytest.raises(ConfigError, match="does not say when to grow"):
        Grow.parse(text)


@pytest.mark.parametrize(
    ("text", "workers", "allowed"),
    [
        ("8,1,4,2", 8, True),
        ("1,2,4,8", 7, False),
        ("multiple:4", 8, True),
        ("multiple:4", 3, False),
        ("multiple:1", 5, True),
    ],
)
def test_allowed_worlds(text, workers, allowed):
    assert WorldSizes.parse(text).allows(workers) is allowed


@pytest.mark.parametrize("text", ["", "0", "0,1", "1,", "multiple:0", "multiple:", "-1", "a"])
def test_bad_world_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="does not say which numbers"):
        WorldSizes.parse(text)


@pytest.mark.parametrize(
    ("text", "nodes"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), ("2:2", (2, 2))]
)
def test_nodes_are_read(text, nodes):
    assert parse_nnodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "-1", "4:1", "0:2", "1:2:3", "1:", ":2", "x", "1.5"])
def test_bad_nodes_are_refused(text):
    with pytest.raises(ConfigError, match="no range of nodes"):
        parse_nnodes(text)


@pytest.mark.parametrize(
    ("text", "shape"), [("2x8", (2, 2, 8)), ("1:4x8", (1, 4, 8)), ("1x1", (1, 1, 1))]
)
def test_shapes_are_read(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["", "2", "0x1", "1x0", "4:1x8", "2x", "x2", "2x8x1", "1:x2"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ConfigError, match="no shape"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node1", ("node1", 29400)),
        ("node1:80", ("node1", 80)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]", ("::1", 29400)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
    ],
)
def test_endpoints_are_read(text, endpoint):
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(format_endpoint(*endpoint)) == endpoint


@pytest.mark.parametrize(
    "text", ["", ":80", "a:b", "a:65536", "a:1:2", "a b:1", "::1", "http://a:1"]
)
def test_bad_endpoints_are_refused(text):
    with pytest.raises(ConfigError, match="no endpoint"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("node1", (("node1", 29400),)),
        ("node1,node2:80", (("node1", 29400), ("node2", 80))),
        ("node1:80, node2:80", (("node1", 80), ("node2", 80))),
        (
            "[fd00::1],[fd00::2]:80,10.0.0.1",
            (("fd00::1", 29400), ("fd00::2", 80), ("10.0.0.1", 29400)),
        ),
        ("node1,node2,node1:29400", (("node1", 29400), ("node2", 29400))),
    ],
)
def test_lists_of_endpoints_are_read(text, endpoints):
    assert parse_endpoints(text) == endpoints
    spelled = ",".join(format_endpoint(*endpoint) for endpoint in endpoints)
    assert parse_endpoints(spelled) == endpoints


@pytest.mark.parametrize("text", ["", ",", "node1,", ",node1", "node1,,node2", "a,b:c"])
def test_bad_lists_of_endpoints_are_refused(text):
    with pytest.raises(ConfigError, match="no endpoint"):
        parse_endpoints(text)


def test_an_ipv6_address_needs_brackets():
    with pytest.raises(ConfigError, match=r"in brackets as in \[fd00::1\]:29400"):
        parse_endpoint("fd00::1")


def test_truth():
    assert all(parse_truth(word) for word in ("1", "true", "True", "YES", "y"))
    assert not any(parse_truth(word) for word in ("0", "false", "no", "N"))
    with pytest.raises(ConfigError, match="neither yes nor no"):
        parse_truth("2")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"min_nodes": 0}, "no range of nodes"),
        ({"min_nodes": 3, "max_nodes": 2}, "no range of nodes"),
        ({"nproc_per_node": 0}, "nproc_per_node must be at least 1"),
        ({"max_restarts": -1}, "max_restarts must not be negative"),
        ({"settle": -1}, "settle must not be negative"),
        ({"wait_for_nodes": -1}, "wait_for_nodes must not be negative"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must not be negative"),
        ({"lease": 0}, "lease must be longer than 0"),
        ({"node_rank": 1}, "--node-rank 1 does not fit"),
        ({"node_rank": -1}, "--node-rank -1 does not fit"),
        ({"max_nodes": 2}, "needs a place to meet"),
        ({"max_nodes": 2, "rdzv_endpoint": "localhost:0"}, "needs a place to meet"),
        ({"rdzv_endpoint": "a:b"}, "no endpoint"),
        ({"rdzv_configs": {"is_host": "maybe"}}, "is_host 'maybe' is neither"),
        (
            {"min_nodes": 2, "max_nodes": 3, "rdzv_endpoint": "a", "world_sizes": WorldSizes((1,))},
            "allows fewer workers than the job has nodes",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LaunchConfig(**fields)


@pytest.mark.parametrize(
    ("backend", "given", "kept"),
    [
        ("c10d", "", ""),
        ("c10d", "node1", "node1:29400"),
        ("static", "node1", "node1:29500"),
        ("c10d", "[::1]:5", "[::1]:5"),
        ("c10d", "localhost:0", ""),
    ],
)
def test_an_endpoint_has_one_spelling(backend, given, kept):
    assert LaunchConfig(rdzv_backend=backend, rdzv_endpoint=given).rdzv_endpoint == kept


def test_is_host():
    assert LaunchConfig().is_host is None
    assert LaunchConfig(rdzv_configs={"is_host": "true"}).is_host is True
    assert LaunchConfig(rdzv_configs={"is_host": "0"}).is_host is False


def test_a_lone_node_gets_an_id_of_its_own():
    ids = {default_run_id(1, "") for _ in range(20)}
    assert len(ids) == 20


def test_nodes_that_spell_the_host_differently_get_the_same_id():
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
