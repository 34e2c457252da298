"""Alone, the collectives give back what they were given."""

from __future__ import annotations

import numpy
import torch

import torchelastic.distributed as edist
from torchelastic.distributed.utils import get_rank


def test_alone_each_gives_back_what_it_was_given():
    data = numpy.arange(4, dtype=numpy.uint8)
    model = torch.nn.Linear(1, 1)
    before = model.weight.item()
    edist.broadcast_model(0, model)
    assert model.weight.item() == before
    assert not edist.is_distributed_training_run()
    assert edist.get_rank() == get_rank() == 0
    assert edist.broadcast_long(7, 0) == 7
    assert edist.broadcast_bool(True, 0) is True
    assert edist.broadcast_float_list([0.1], 0) == [0.1]
    assert edist.all_gather_return_max_long(5) == (0, 5)
    assert edist.broadcast_binary(data, 0) is data


def test_every_name_is_there():
    assert all(callable(getattr(edist, name)) for name in edist.__all__)
