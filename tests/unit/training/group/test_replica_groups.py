"""The groups of a replica: made before there is a world, and connected anew in each."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchelastic import torch_private
from torchelastic.errors import ConfigError
from torchelastic.training.group import gloo
from torchelastic.training.group.group import GenerationOver, Group
from torchelastic.training.group.replica import Replica

SOON = timedelta(seconds=20)


@pytest.fixture
def make():
    def made(size=1, backend=""):
        return Replica(size, 0, SOON, backend)

    yield made
    if dist.is_initialized():
        dist.destroy_process_group()
    gloo.uninstall()
    torch_private.count_groups_anew()


def enter(replica, generation):
    group = Group(
        store=dist.HashStore(),
        rank=0,
        size=1,
        generation=generation,
        timeout=SOON,
        replica=replica,
    )
    group.connect()
    return group


def test_nothing_can_be_sent_before_there_is_a_world(make):
    make(2)
    init_device_mesh("cpu", (2,))
    with pytest.raises(ConfigError, match="no connection for all_reduce before"):
        dist.all_reduce(torch.ones(1))


def test_one_group_object_serves_all_worlds(make):
    replica = make()
    default, beside = dist.group.WORLD, dist.new_group([0])
    for generation in range(2):
        world = enter(replica, generation)
        inside = dist.new_group([0])
        assert type(inside._gloo) is gloo._Later, "a replacement makes it in its first step"
        for group in (default, beside, inside):
            dist.all_reduce(torch.ones(1), group=group)
        assert world.leave()
        with pytest.raises(GenerationOver):
            dist.all_reduce(torch.ones(1), group=beside)
    assert dist.group.WORLD is default


def test_a_second_default_group_is_refused(make):
    make()
    with pytest.raises(ConfigError, match="leave init_process_group out"):
        make()


class Native:
    """What NCCL would be: it takes tensors that are not the host's."""

    def __init__(self, *made):
        self.made, self.calls, self.aborted = made, [], 0
        self._device_types = [torch.device("cpu")]

    def allreduce(self, tensors, options):
        self.calls.append(tensors[0].device.type)

    def abort(self):
        self.aborted += 1

    def name(self):
        return "native"

    def _get_sequence_number_for_group(self):
        return len(self.calls)

    def _get_backend(self, device):
        return self


def test_tensors_of_a_device_go_to_its_own_backend(make, monkeypatch):
    monkeypatch.setattr(torch_private, "native_group", Native)
    replica = make(backend="nccl")
    worlds = []
    for generation in range(2):
        world = enter(replica, generation)
        group = dist.group.WORLD
        group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        for _ in range(2):
            group.allreduce([torch.ones(1, device="meta")], dist.AllreduceOptions())
        world.check_collectives(again=False)
        worlds.append(world)
        (native,) = world._natives
        assert (native.made[0], native.calls) == ("nccl", ["meta", "meta"])
        world.abort("a test says so")
        assert native.aborted == 1
        world.leave()
        assert world._natives == []
