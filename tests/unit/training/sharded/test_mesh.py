"""Where a worker is in its replica, and which samples it reads."""

from types import SimpleNamespace

import pytest

from torchelastic import env
from torchelastic.errors import ConfigError
from torchelastic.training.sharded import mesh


@pytest.mark.parametrize(
    ("size", "asked", "local_rank", "local_size", "place", "coordinate"),
    [
        pytest.param(2, None, 3, 4, 0, 1, id="two replicas on a node"),
        pytest.param(4, None, 3, 4, 0, 3, id="one replica on a node"),
        pytest.param(2, 2, 2, 4, 0, 0, id="the size is asked for, too"),
        pytest.param(4, 4, 1, 2, 1, 3, id="a replica on two nodes"),
        pytest.param(1, None, 1, 2, 0, 0, id="replicas of one"),
    ],
)
def test_coordinates(size, asked, local_rank, local_size, place, coordinate):
    found = mesh.coordinate_of(
        size, asked=asked, local_rank=local_rank, local_size=local_size, place=place
    )
    assert found == coordinate


@pytest.mark.parametrize(
    ("size", "asked", "message"),
    [(8, None, "pass --replica-size 8"), (4, 2, "--replica-size is 2"), (3, None, "of 3.$")],
)
def test_meshes_that_do_not_fit(size, asked, message):
    with pytest.raises(ConfigError, match=message):
        mesh.coordinate_of(size, asked=asked, local_rank=0, local_size=4, place=0)


@pytest.mark.parametrize(
    ("sizes", "data", "coordinate", "place"),
    [
        ({"shard": 4}, ("shard",), 3, (3, 4, True)),
        ({"shard": 2, "tensor": 2}, ("shard",), 2, (1, 2, True)),
        ({"shard": 2, "tensor": 2}, ("shard",), 3, (1, 2, False)),
        ({"tensor": 4}, ("shard",), 0, (0, 1, True)),
        ({"tensor": 4}, ("shard",), 2, (0, 1, False)),
        ({"stage": 2, "rows": 2, "columns": 2}, ("rows", "columns"), 3, (3, 4, True)),
        ({"stage": 2, "rows": 2, "columns": 2}, ("rows", "columns"), 7, (3, 4, False)),
    ],
)
def test_workers_read_different_samples_along_some_dimensions(sizes, data, coordinate, place):
    replica = SimpleNamespace(coordinate=coordinate)
    mesh._place_data(replica, sizes, data)
    assert (replica.data_rank, replica.data_size, replica.is_recorder) == place


def test_a_dimension_that_is_not_there():
    with pytest.raises(ConfigError, match="'rows', which is not a dimension"):
        mesh._place_data(SimpleNamespace(coordinate=0), {"shard": 2}, ("rows",))


@pytest.mark.parametrize("sizes", [{}, {"shard": 0}, {"shard": 2.0}])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ConfigError, match="sizes of at least 1"):
        mesh.mesh(sizes)


def test_a_process_without_an_agent(monkeypatch):
    monkeypatch.setattr(env, "get", lambda name, default=None: default)
    with pytest.raises(ConfigError, match="start the script with 'torchelastic run'"):
        mesh.mesh({"shard": 2})
