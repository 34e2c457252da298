"""torchrun's flags as a job of ours."""

from tests.unit.cli.tables import not_refused
from torchelastic.compat.torchrun.torchrun_flags import launch_config


def made(endpoint="node1", run_id="job", nodes=(1, 2), **conf):
    return launch_config(endpoint, run_id, nodes, conf)


def test_the_endpoint_or_a_key_says_where_the_nodes_meet():
    cases = [
        ("node1", {}, "c10d", "node1:29400"),
        ("node1:1234", {"backend": "c10d"}, "c10d", "node1:1234"),
        ("tcp://node1:1234", {}, "c10d", "node1:1234"),
        ("e1:23790", {"backend": "etcd"}, "etcd", "e1:23790"),
        ("etcd://e1", {}, "etcd", "e1:2379"),
        ("etcd://e1,e2:1234", {}, "etcd", "e1:2379,e2:1234"),
        ("etcd-v3://e1", {"backend": "etcd-v3"}, "etcd-v3", "e1:2379"),
        ("node1,node2:1234", {}, "c10d", "node1:29400,node2:1234"),
    ]
    for endpoint, conf, *expected in cases:
        config = made(endpoint, **conf)
        assert [config.rdzv_backend, config.rdzv_endpoint] == expected


def test_keys_mean_what_they_mean_to_torchrun():
    config = made(last_call_timeout=2, join_timeout=60, timeout=900, keep_alive_interval=1)

    assert (config.settle, config.wait_for_nodes, config.lease) == (2.0, 60.0, 3.0)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 1)
    # for flags that torchrun has not
    assert made(witness="/shared").witness == "/shared"
    config = made(quorum="none", two_node_takeover="1", secret_file="/secret")

    assert (config.quorum, config.two_node_takeover) == ("none", True)
    assert config.rdzv_secret_file == "/secret"
    assert config.max_restarts > 1_000_000, "our budget is not what ends the job"


def test_invalid_flags_are_reported_before_join():
    cases = [
        ({"endpoint": "etcd://e1", "backend": "c10d"}, "disagree"),
        ({"endpoint": "zookeeper://z"}, "Unknown rendezvous backend 'zookeeper'"),
        ({"endpoint": "etcd://e1", "run_id": "none"}, "--rdzv-id"),
        ({"endpoint": ""}, "--rdzv-endpoint"),
        ({"quorum": "some"}, "must be majority or none"),
        ({"two_node_takeover": "maybe"}, "neither yes nor no"),
        ({"last_call_timeout": "soon"}, "'soon' is not a valid time"),
    ]
    assert not_refused(lambda given: made(**given), cases) == []
