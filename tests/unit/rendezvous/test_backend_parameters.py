import pytest

from torchelastic.errors import ConfigError
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.backend_parameters import fields_from_conf, keys_without_meaning


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
    with pytest.raises(ConfigError, match=r"last_call_timeout.*is not a valid duration"):
        fields_from_conf({"last_call_timeout": value})


def test_keys_without_a_meaning_are_named():
    conf = {"timeout": 1, "store_type": "file", "etcd_prefix": "/here"}
    assert keys_without_meaning(conf, "c10d") == ["etcd_prefix", "store_type"]
    assert keys_without_meaning(conf, "etcd") == ["store_type"]
