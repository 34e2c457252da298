"""Parameters of a rendezvous: the old APIs', URLs, and the settings that all nodes share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.config import Grow, LaunchConfig
from torchelastic.errors import ConfigError
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.backend_parameters import (
    RendezvousUrl,
    fields_from_conf,
    keys_without_meaning,
    parse_url,
)
from torchelastic.rendezvous.job_settings import JobSettings

# --- backend parameters ---------------------------------------------------------------------------


def parameters(backend="c10d", nodes=(1, 2), **conf):
    return RendezvousParameters(backend, "node1:29400", "job-1", *nodes, **conf)


def test_parameters_keep_what_they_are_given():
    params = parameters(timeout=7, local_addr="10.0.0.1")

    assert (params.backend, params.endpoint, params.run_id) == ("c10d", "node1:29400", "job-1")
    assert (params.min_nodes, params.max_nodes) == (1, 2)
    assert params.get("local_addr") == "10.0.0.1"
    assert params.get("missing") is None
    assert params.get("missing", "else") == "else"
    assert (params.timeout, params.last_call_timeout) == (7, 30)


@pytest.mark.parametrize("nodes", [(0, 1), (2, 1), (-1, -1)])
def test_a_range_of_nodes_must_be_one(nodes):
    with pytest.raises(ConfigError, match="not a valid range"):
        parameters(nodes=nodes)


@pytest.mark.parametrize(
    ("given", "read"),
    [("1", True), ("yes", True), (1, True), (True, True), ("0", False), ("no", False), (0, False)],
)
def test_truth_is_read(given, read):
    assert parameters(key=given).get_as_bool("key") is read


def test_numbers_are_read():
    assert parameters(key="12").get_as_int("key") == 12
    assert parameters().get_as_int("key", 3) == 3
    assert parameters().get_as_int("key") is None
    assert parameters().get_as_bool("key") is None


def test_parameters_unreadable_value_is_named():
    with pytest.raises(ConfigError, match="key: 'twelve' is not a whole number"):
        parameters(key="twelve").get_as_int("key")
    with pytest.raises(ConfigError, match="key: 'maybe' is neither yes nor no"):
        parameters(key="maybe").get_as_bool("key")


@pytest.mark.parametrize(
    ("conf", "fields"),
    [
        ({}, {}),
        ({"last_call_timeout": 5}, {"settle": 5.0}),
        ({"keep_alive_interval": "2"}, {"lease": 6.0}),
        ({"keep_alive_interval": "1", "keep_alive_max_attempt": 2}, {"lease": 2.0}),
        ({"timeout": 900}, {"wait_for_nodes": 900.0}),
        ({"timeout": 900, "join_timeout": "60"}, {"wait_for_nodes": 60.0}),
        ({"rank": "1"}, {"node_rank": 1}),
        ({"read_timeout": 60, "is_host": 1}, {}),
    ],
)
def test_torchruns_keys_set_our_fields(conf, fields):
    assert fields_from_conf(conf) == fields


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", None])
def test_a_time_must_be_one(value):
    with pytest.raises(ConfigError, match=r"last_call_timeout.*is not a valid time"):
        fields_from_conf({"last_call_timeout": value})


def test_keys_without_a_meaning_are_named():
    conf = {"timeout": 1, "store_type": "file", "etcd_prefix": "/here"}
    assert keys_without_meaning(conf, "c10d") == ["etcd_prefix", "store_type"]
    assert keys_without_meaning(conf, "etcd") == ["store_type"]


# --- url ------------------------------------------------------------------------------------------

SEED = "etcd://localhost:2379/1234?min_workers=2&max_workers=4"


def made(**more):
    given = {"backend": "etcd", "endpoint": "h:2379", "run_id": "r"}
    return RendezvousUrl(**(given | {"min_workers": 2, "max_workers": 2} | more))


@pytest.mark.parametrize(
    ("url", "read"),
    [
        (SEED, made(endpoint="localhost:2379", run_id="1234", max_workers=4)),
        ("etcd://h/r?min_workers=2", made()),
        ("etcd://h:1/r/?min_workers=2", made(endpoint="h:1")),
        ("etcd://[::1]/r?min_workers=2", made(endpoint="[::1]:2379")),
        ("etcd://a:1,b/r?min_workers=2", made(endpoint="a:1,b:2379")),
        ("etcd://a,[::1]:1,[::2]/r?min_workers=2", made(endpoint="a:2379,[::1]:1,[::2]:2379")),
        ("etcd://h/a%2Fb%20c?min_workers=2", made(run_id="a/b c")),
        ("tcp://h/r?min_workers=2", made(backend="c10d", endpoint="h:29400")),
        (
            "tcp://h:5/r?min_workers=2&max_workers=3",
            made(backend="c10d", endpoint="h:5", max_workers=3),
        ),
        (
            "etcd://h/r?min_workers=2&timeout=600&last_call_timeout=0.5",
            made(timeout=600.0, last_call_timeout=0.5),
        ),
        (
            "tcp://h/r?min_workers=2&quorum=none&progress_timeout=0",
            made(backend="c10d", endpoint="h:29400", quorum="none", progress_timeout=0.0),
        ),
        (
            "tcp://h/r?min_workers=2&witness=/shared/votes",
            made(backend="c10d", endpoint="h:29400", witness="/shared/votes"),
        ),
        (
            "tcp://h/r?min_workers=2&secret_file=/run/secret&tls_ca=ca.pem",
            made(
                backend="c10d",
                endpoint="h:29400",
                files={"secret_file": "/run/secret", "tls_ca": "ca.pem"},
            ),
        ),
        (
            "etcd://h/r?min_workers=2&etcd_prefix=/torchelastic/p2p&protocol=http",
            made(options={"etcd_prefix": "/torchelastic/p2p", "protocol": "http"}),
        ),
    ],
)
def test_url_is_read(url, read):
    assert parse_url(url) == read


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "is not a rendezvous URL"),
        ("tcp://h/r?min_workers=1&quorum=all", "use majority or none"),
        ("etcd://h/r?min_workers=1&quorum=none", "Unknown parameter"),
        ("localhost:2379/r?min_workers=1", "is not a rendezvous URL"),
        ("zookeeper://h/r?min_workers=1", "where SCHEME is etcd or tcp"),
        ("etcd://[::1/r?min_workers=1", "has no host"),
        ("etcd:///r?min_workers=1", "has no host"),
        ("etcd://a,,b/r?min_workers=1", "has no host"),
        ("etcd://h:99999/r?min_workers=1", "has no host"),
        ("etcd://me:secret@h/r?min_workers=1", "a user or a fragment"),
        ("etcd://h/r?min_workers=1#x", "a user or a fragment"),
        ("etcd://h?min_workers=1", "has no job id"),
        ("etcd://h/r", "lacks min_workers"),
        ("etcd://h/r?min_workers=two", "min_workers='two' in .* is not a whole number"),
        ("etcd://h/r?min_workers=-1", "min_workers='-1' in .* is not a whole number"),
        ("etcd://h/r?min_workers=", "min_workers='' in .* is not a whole number"),
        ("etcd://h/r?min_workers=0", "not a valid range"),
        ("etcd://h/r?min_workers=3&max_workers=2", "not a valid range"),
        ("etcd://h/r?min_workers=1&min_workers=2", "'min_workers' appears twice"),
        ("etcd://h/r?min_workers=1&timeout=soon", "timeout in .*: 'soon' is not a valid time"),
        ("etcd://h/r?min_workers=1&last_call_timeout=inf", "in .*: 'inf' is not a valid time"),
        ("etcd://h/r?min_workers=1&max_worker=2", "Unknown parameter 'max_worker' in"),
        ("tcp://h/r?min_workers=1&etcd_prefix=/x", "Unknown parameter 'etcd_prefix' in"),
    ],
)
def test_url_that_is_invalid_is_refused(url, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_url(url)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


# --- job settings ---------------------------------------------------------------------------------

# What nodes of one job must have in common, by table.

CONFIG = LaunchConfig(1, 4, 8, run_id="job", rdzv_endpoint="node1:29400")
OURS = JobSettings.from_config(CONFIG)


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"nproc_per_node": 2, "role": "actor", "settle": 9.0, "max_restarts": 1}, ()),
        ({"min_nodes": 2}, ("--nnodes (1:4 on this node, 2:4 in the job)",)),
        (
            {"min_nodes": 4, "quorum": "none"},
            (
                "--nnodes (1:4 on this node, 4 in the job)",
                "--quorum (majority on this node, none in the job)",
            ),
        ),
        (
            {"two_node_takeover": True},
            ("--two-node-takeover (no on this node, yes in the job)",),
        ),
        ({"witness": "/shared"}, ("--witness (none on this node, /shared in the job)",)),
        ({"replica_size": 4}, ("--replica-size (not given on this node, 4 in the job)",)),
        ({"grow": Grow("every", 30.0)}, ("--grow (any on this node, every:30 in the job)",)),
    ],
)
def test_flags_of_the_job_are_alike_and_those_of_a_node_are_its_own(changes, differing):
    theirs = JobSettings.from_config(replace(CONFIG, **changes))
    objection = OURS.objection(theirs.to_json())
    assert bool(objection) == bool(differing) == (OURS.digest != theirs.digest)
    for words in differing:
        assert words in objection


@pytest.mark.parametrize(
    ("ours", "theirs", "may_mix"),
    [
        ("1.2.0", "1.2.3", True),
        ("1.2.0.dev0", "1.2.0", True),
        ("1.3.0", "1.2.0", False),
        ("2.2.0", "1.2.0", False),
    ],
)
def test_releases_mix_within_a_series(ours, theirs, may_mix):
    here, there = JobSettings({}, ours), JobSettings({}, theirs)
    objection = here.objection(there.to_json())
    assert (here.digest == there.digest) == may_mix == (not objection)
    if objection:
        assert f"This node runs torchelastic {ours}, but the job runs {theirs}: " in objection


def test_a_leader_that_shows_nothing_is_taken_as_it_is():
    assert OURS.objection({"node": "a"}) == ""


@pytest.mark.parametrize(
    ("nproc", "differing"),
    [
        (2, ""),
        (8, "--nproc-per-node (2 on this node, a multiple of 4 in the job)"),
        (1, "--nproc-per-node (2 on this node, 1 in the job)"),
    ],
)
def test_nodes_that_share_a_replica_have_as_many_workers(nproc, differing):
    ours, theirs = (
        JobSettings.from_config(replace(CONFIG, replica_size=4, nproc_per_node=workers))
        for workers in (2, nproc)
    )
    assert differing in ours.objection(theirs.to_json())
    assert bool(differing) == (ours.digest != theirs.digest)
