"""Which rank this is: said, of the process group, of the environment, or alone."""

import pytest
import torch.distributed as dist

from torchelastic.data.own_rank import own_rank
from torchelastic.errors import ConfigError


@pytest.fixture(autouse=True)
def no_world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_alone():
    assert own_rank() == (0, 1)


def test_of_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert own_rank() == (2, 3)
    assert own_rank(1, 2) == (1, 2)


def test_of_the_process_group_before_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert own_rank() == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("given", [(2, 2), (-1, 2), (0, 0)])
def test_no_such_rank(given):
    with pytest.raises(ConfigError, match="There is no rank"):
        own_rank(*given)


def test_half_an_answer_is_none():
    with pytest.raises(ConfigError, match="belong together"):
        own_rank(rank=1)
