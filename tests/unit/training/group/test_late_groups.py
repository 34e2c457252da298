"""Groups that torch makes itself, on a back end with the habits of NCCL (`tests.late_backend`)."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import late_backend
from tests.late_backend import GARBAGE, LateGroup, device
from tests.support import poll_for
from tests.unit.training.fake_agent import Coordinator, Counting, begin, finish
from torchelastic import TorchState, torch_backends, torch_private
from torchelastic.compat import collectives
from torchelastic.errors import ConfigError, StopException
from torchelastic.tensors import agreement
from torchelastic.training import session
from torchelastic.training.group import abortable_waits, gloo, native_groups
from torchelastic.training.group import group as groups
from torchelastic.training.group.group import GenerationOver, Group, PeerLostError
from torchelastic.training.group.replica import Replica
from torchelastic.worker import status_page as status_pages
from torchelastic.worker.collective_log import LoggedCollective as Shown
from torchelastic.worker.collective_log import read
from torchelastic.worker.orders import Over, Ping, Pong, Stopped

SOON = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def late(monkeypatch):
    for name in ("synchronize", "current_stream"):  # so that they are put back afterwards
        monkeypatch.setattr(torch.cpu, name, getattr(torch.cpu, name))
    late_backend.register()
    monkeypatch.setattr(abortable_waits, "IDLE", 0.05)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield
    LateGroup.reachable.set()
    device.moves.set()
    device.synchronize()


@pytest.fixture
def alone():
    """The group of a world of one."""
    group = build(0)
    yield group
    group.leave()


@pytest.fixture
def memory():
    descriptor = status_pages.create()
    yield descriptor
    os.close(descriptor)


def build(generation):
    store = dist.HashStore()
    return Group.build(
        store=store, rank=0, size=1, generation=generation, backend="late", timeout=SOON
    )


def abort_once_busy(group):
    """In a thread, as the control thread does."""

    def run():
        poll_for(lambda: group.pending, what="something under way")
        group.abort("a test says so")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("backend", "place"),
    [
        ("gloo", "cpu"),
        ("late", "cpu"),
        ("nccl", "cuda"),
        ("NCCL", "cuda"),
        ("nccl2", "cuda"),  # these are of torch 2.15
        ("nccl-lazy", "cuda"),
        ("nccl-legacy", "cuda"),
        ("xccl", "xpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda"),
        ("undefined", "cpu"),  # init_process_group() without a name
        ("of somebody else", "cpu"),
    ],
)
def test_backend_determines_the_device_of_tensors(backend, place):
    assert torch_backends.device_of(backend) == place


@pytest.mark.parametrize(
    ("given", "becomes"), [(None, "2"), ("1", "2"), ("3", "2"), ("2", "2"), ("0", "0")]
)
def test_no_watchdog_ends_a_survivor(given, becomes):
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    if given is not None:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = given
    native_groups.spare_process()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == becomes
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"


def test_a_group_is_built_aborted_and_built_again(alone):
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.tolist() == [1, 1]
    device.moves.clear()
    alone.check_collectives()
    dist.all_reduce(ones, async_op=True)
    thread = abort_once_busy(alone)
    with pytest.raises(GenerationOver):
        alone.check_collectives(again=False)
    thread.join()
    assert ones.tolist() == [GARBAGE, GARBAGE]
    with pytest.raises(RuntimeError) as refused:
        dist.all_reduce(ones)
    assert isinstance(alone.explain(refused.value), GenerationOver)
    # What user code makes of the garbage is not an error of its own.
    assert isinstance(alone.explain(StopException("the loss is 77")), GenerationOver)
    assert alone.leave()
    device.moves.set()
    again = build(1)
    dist.all_reduce(torch.ones(1))
    again.check_collectives()
    assert again.leave()


def test_an_abort_ends_the_wait_for_the_first_connection(alone):
    LateGroup.reachable.clear()
    thread = abort_once_busy(alone)
    with pytest.raises(GenerationOver):
        session.exchange(alone, (0, 3), 7)
    thread.join()
    assert alone.leave()


def test_watchdog_error_becomes_a_lost_peer(alone):
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    dist.all_reduce(torch.ones(1))
    alone.check_collectives()
    (native,) = native_groups.groups()
    native.set_timeout(timedelta(seconds=0))
    device.moves.clear()
    dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(PeerLostError, match="late reports COMM_ERROR"):
        alone.check_collectives()
    with pytest.raises(RuntimeError) as refused:
        dist.all_reduce(torch.ones(1))
    assert isinstance(alone.explain(refused.value), PeerLostError)
    assert isinstance(alone.explain(ValueError("nan")), PeerLostError)


def test_a_device_that_is_busy_waits_for_others_and_is_stuck_long_after_an_abort(
    alone, monkeypatch
):
    dist.all_reduce(torch.ones(1))
    alone.check_collectives()
    poll_for(lambda: not alone.pending, what="an idle device")
    device.moves.clear()
    monkeypatch.setattr(LateGroup, "abort", lambda self: None)  # one that frees nothing
    dist.all_reduce(torch.ones(1), async_op=True)
    assert alone.pending == 1
    alone.abort("a test says so")
    assert alone.pending == 0  # not yet: the device may still be computing
    monkeypatch.setattr(groups, "_ABORT_TAKES", 0.0)
    poll_for(lambda: alone.pending == 1, what="a stuck device")
    device.moves.set()


def test_collectives_that_torch_counts_are_shown_when_the_agent_asks(alone, memory):
    status_page = status_pages.StatusPage(memory)
    other = dist.new_group([0], backend="late")
    alone.waits.shown = status_page.collectives
    status_page.collectives.enter(0)
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=other)
    alone.check_collectives()
    alone.show()
    seen = read(memory)
    assert seen.waits is None
    assert seen.launched == (Shown("collective", 2, "0"), Shown("collective", 1, "1"))
    device.moves.clear()
    dist.all_reduce(torch.ones(1), async_op=True)
    alone.show()
    assert read(memory).waits == Shown("collective", 3, "0")
    device.moves.set()
    alone.check_collectives()
    assert read(memory).waits is None
    alone.waits.shown = None
    status_page.close()


def test_an_abort_that_is_refused_does_not_keep_others_from_theirs(alone, monkeypatch, caplog):
    other = dist.new_group([0], backend="late")
    default = dist.distributed_c10d._get_default_group()
    dist.all_reduce(torch.ones(1), group=other)

    def refuse():
        raise RuntimeError("not supported")

    monkeypatch.setattr(default, "abort", refuse, raising=False)
    alone.abort("a test says so")
    assert "Could not abort a process group of late: not supported" in caplog.text
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(torch.ones(1), group=other)
    monkeypatch.undo()


def test_votes_of_a_script_do_not_wait_for_a_device(alone):
    """Those of a larger world: what a world of one says is not asked."""
    assert agreement.quick_group() is None
    assert torch_backends.is_on_host("gloo")
    assert not torch_backends.is_on_host(dist.get_backend())
    assert collectives.convert_to_distributed_tensor(torch.ones(1))[1] == "cpu"


# --- the loop ------------------------------------------------------------------------------------


class LateCoordinator(Coordinator):
    def __init__(self, *args):
        super().__init__(*args)
        self.c10d_backend = "late"


def over_in_step(step, stopped):
    """The script of a world that ends while its step hangs; the next one takes it again."""

    def script(agent):
        begin(agent)
        poll_for(lambda: stopped and not device.query(), what="a collective that hangs")
        agent.say(Ping(5))
        assert agent.hear(Pong) == Pong(waiting=True, number=5)
        agent.say(Over(0, "a failure"))
        assert agent.hear(Stopped) == Stopped(0, step)
        device.moves.set()
        begin(agent, 1, step)
        finish(agent, 1, 3)

    return script


def test_a_step_whose_collective_was_aborted_is_not_committed(run):
    """It returns without an error, with garbage: the device does not tell."""
    state = Counting()

    def step(state):
        if state.count == 2 and not stopped:
            device.moves.clear()
            dist.all_reduce(torch.ones(1), async_op=True)
            stopped.append(True)
        state.count += 1
        if state.count == 4:
            raise StopIteration

    stopped = []
    run(over_in_step(2, stopped), step, state, coordinator=LateCoordinator)


def test_an_optimizer_writes_nothing_that_was_aborted(run):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)
    seen, stopped = [], []

    def step(state):
        if len(seen) == 3:
            raise StopIteration
        if len(seen) == 1 and not stopped:
            stopped.append(True)
            device.moves.clear()
        optimizer.zero_grad()
        state.model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        seen.append(model.weight.detach().clone())

    run(over_in_step(1, stopped), step, state, coordinator=LateCoordinator)
    assert (seen[1] - seen[0]).abs().max() < 1
    assert torch.equal(model.weight, seen[2])


def test_a_collective_after_the_write_is_noticed_when_the_step_ends(run, caplog):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)

    def step(state):
        if state.step == 2:
            raise StopIteration
        loss = state.model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())

    def script(agent):
        begin(agent)
        finish(agent, step=2)

    run(script, step, state, coordinator=LateCoordinator)
    assert state._undo.writes.known is True
    assert "A collective runs after optimizer.step" in caplog.text


# --- the groups of a replica ----------------------------------------------------------------------


SOON_ENOUGH = timedelta(seconds=20)


@pytest.fixture
def make():
    def made(size=1, backend=""):
        return Replica(size, 0, SOON_ENOUGH, backend)

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
        timeout=SOON_ENOUGH,
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
