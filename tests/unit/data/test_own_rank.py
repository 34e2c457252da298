"""Which rank this is: said, of the process group, of the environment, or alone."""

import pytest
import torch.distributed as dist

from torchelastic.data.own_rank import own_rank
from torchelastic.errors import ConfigError


def test_said_or_of_the_process_group_or_of_the_environment_or_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert own_rank() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert own_rank() == (2, 3)
    assert own_rank(1, 2) == (1, 2)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert own_rank() == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((2, 2), "rank 2 is not in a world of size 2"),
        ((-1, 2), "is not in a world"),
        ((0, 0), "is not in a world"),
        ((1, None), "both rank and size"),
    ],
)
def test_no_such_rank(given, told):
    with pytest.raises(ConfigError, match=told):
        own_rank(*given)
