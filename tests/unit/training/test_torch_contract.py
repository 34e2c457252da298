"""How torch and gloo behave where `torchelastic.training.group.group` relies on it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._jit_internal import _extract_tensors
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d

from torchelastic import torch_private
from torchelastic.errors import ConfigError
from torchelastic.training.group import abortable_waits as group_threads
from torchelastic.training.group import gloo, sockets
from torchelastic.training.group.abortable_waits import (
    AbortableOperation,
    OwnedWork,
    Waits,
    _Failed,
)
from torchelastic.training.group.gloo import OwnedGloo
from torchelastic.training.group.group import GenerationOver, Group

SOON = timedelta(seconds=20)


@pytest.fixture
def alone(monkeypatch):
    """The group of a world of one."""
    monkeypatch.setattr(group_threads, "IDLE", 0.05)
    group = Group.build(store=dist.HashStore(), rank=0, size=1, generation=3, timeout=SOON)
    yield group
    group.leave()


def gloo_pair(timeout):
    """Two ranks of plain gloo in this process: the groups, and the connections of the first."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: gloo.connect(store, rank, 2, timeout)[:2], range(2)))


def test_a_group_of_gloo_is_ours_while_a_world_is_alive(alone):
    default = distributed_c10d._get_default_group()
    assert isinstance(default, OwnedGloo), "torch no longer makes groups by ProcessGroupGloo(...)"
    assert isinstance(dist.new_group([0], backend="gloo"), OwnedGloo)
    assert dist.get_backend() == "gloo"
    alone.leave()
    assert distributed_c10d.ProcessGroupGloo is torch_private.Gloo
    assert not dist.is_initialized()


def test_an_argument_of_a_later_torch_is_refused_only_where_it_asks_for_something(alone):
    """torch 2.14 added `enable_reconfigure` to all groups of gloo, and every world failed."""
    group = OwnedGloo(dist.HashStore(), 0, 1, SOON, of_tomorrow=False, hints=None)
    assert group.allreduce([torch.ones(1)]).wait()
    with pytest.raises(NotImplementedError, match="create them without of_tomorrow"):
        OwnedGloo(dist.HashStore(), 0, 1, SOON, of_tomorrow=True)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # of the names before 2.13
def test_every_collective_of_torch_is_an_operation_of_ours(alone):
    one = torch.ones(1)
    collected = [torch.zeros(1)]
    default = distributed_c10d._get_default_group()
    calls = [
        lambda: dist.all_reduce(one, async_op=True),
        lambda: dist.broadcast(one, 0, async_op=True),
        lambda: dist.reduce(one, 0, async_op=True),
        lambda: dist.all_gather(collected, one, async_op=True),
        lambda: dist.all_gather_into_tensor(collected[0], one, async_op=True),
        lambda: dist.gather(one, collected, async_op=True),
        lambda: dist.scatter(one, collected, async_op=True),
        lambda: dist.reduce_scatter(one, collected, async_op=True),
        lambda: dist.reduce_scatter_tensor(one, collected[0], async_op=True),
        lambda: dist.all_to_all_single(one, collected[0], async_op=True),
        lambda: dist.barrier(async_op=True),
        lambda: default.allreduce_coalesced([one, one]),
        lambda: default.allgather_into_tensor_coalesced(collected, [one]),
        lambda: default.reduce_scatter_tensor_coalesced([one], collected),
    ]
    for number, call in enumerate(calls, start=1):
        work = call()
        assert isinstance(work, OwnedWork), f"torch has a new name for collective {number}"
        assert work.wait()
        assert alone.launched == number
    assert alone.pending == 0


def test_objects_and_a_monitored_barrier_go_through(alone):
    heard = [None]
    dist.all_gather_object(heard, {"a": 1})
    assert heard == [{"a": 1}]
    dist.monitored_barrier()


def test_the_hook_is_called_before_each_collective_of_any_group(alone):
    seen = []
    alone.before_collective = lambda: seen.append(alone.launched)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
    assert seen == [0, 1]


def test_nothing_is_launched_after_an_abort(alone):
    alone.abort("the test is over")
    with pytest.raises(GenerationOver, match="Generation 3 is over: the test is over"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(GenerationOver):
        dist.new_group([0])
    assert alone.launched == 0
    assert alone.leave()


def test_two_backends_in_one_group_are_refused():
    with pytest.raises(ConfigError, match=r"use one, and create a group for the other"):
        Group(
            store=dist.HashStore(),
            rank=0,
            size=1,
            generation=0,
            backend="cpu:gloo,cuda:nccl",
            timeout=SOON,
        )


def test_ranks_tell_in_the_store_where_they_listen():
    (first, connections), (second, others) = gloo_pair(SOON)
    assert len(connections) == len(others) == 1, "gloo's cards in the store are not understood"
    assert not connections & others
    work = first.allreduce([torch.ones(1)])
    sockets.shut_down(connections)
    with pytest.raises(RuntimeError, match=r"closed|reset"):
        work.wait()
    del first, second


def test_gloo_tells_the_end_by_a_future():
    (first, _), (second, _) = gloo_pair(SOON)
    works = [group.allreduce([torch.ones(2)]) for group in (first, second)]
    told = threading.Event()
    works[0].get_future().add_done_callback(lambda future: told.set())
    assert told.wait(10), "the future of a collective of gloo's is not completed"
    assert works[0].get_future().value()[0].tolist() == [2, 2]


def test_a_wait_in_gloo_can_be_limited():
    (first, _), (second, _) = gloo_pair(SOON)
    work = first.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=1))
    assert not work.is_completed()
    second.allreduce([torch.ones(1)]).wait()
    assert work.wait()


def test_only_what_torch_waits_for_at_once_is_no_work(alone, monkeypatch):
    """Scripts and C++ code need a Work."""
    entered, enter = [], alone.waits.enter
    monkeypatch.setattr(
        alone.waits, "enter", lambda one: (entered.append(type(one)), enter(one))[1]
    )
    dist.all_reduce(torch.ones(1))
    assert entered == [AbortableOperation], "torch does not say that it waits"
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    funcol.wait_tensor(funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD))
    assert entered == [AbortableOperation, OwnedWork, OwnedWork]


def test_ddp_finds_the_tensors_of_a_future_by_pickling_it():
    one = torch.ones(1)
    assert _extract_tensors([one])[0] is one
    with pytest.raises(GenerationOver):
        _extract_tensors(_Failed(GenerationOver("over")))


def test_an_ended_future_raises_in_python():
    waits = Waits()
    work = OwnedWork(waits, waits.announce())
    future = work.get_future()
    work.finish(GenerationOver("over"), None)
    with pytest.raises(GenerationOver):
        future.wait()


def test_gloo_is_dropped_without_the_lock_of_the_interpreter():
    (first, _), (second, _) = gloo_pair(timedelta(seconds=0.5))
    stuck = first.allreduce([torch.ones(1)])  # the second never comes
    owner = [first]
    del first
    dropping = threading.Thread(target=owner.clear)
    dropping.start()
    turns = 0
    while dropping.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 50, "dropping a group of gloo's stops all threads of Python"
    with pytest.raises(RuntimeError):
        stuck.wait()
    del second


def test_gloo_bears_with_a_connection_that_says_nothing():
    """Who looks whether a rank can be reached connects to its port, and closes again."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gloo.connect, store, 0, 2, SOON)
        address = sockets.listening_address(store.get("0/0"))
        for _ in range(3):
            assert not sockets.is_silent(address)
        second = pool.submit(gloo.connect, store, 1, 2, SOON)
        groups = [made.result()[0] for made in (first, second)]
    assert gloo.silent_peer(store, 1, 2, 2) == ""
    ones = [torch.ones(1), torch.ones(1)]
    works = [group.allreduce([one]) for group, one in zip(groups, ones, strict=True)]
    for work in works:
        work.wait()
    assert ones[0].item() == 2.0
