"""The time a training thread waits for others is counted, in a world and in a script."""

import os
import socket
import threading
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import poll_for
from torchelastic.training.group import abortable_waits, gloo, sockets
from torchelastic.training.group import abortable_waits as waits_module
from torchelastic.training.group import group as group_module
from torchelastic.training.group.abortable_waits import (
    AbortableOperation,
    GenerationOver,
    PeerLostError,
    Waits,
)
from torchelastic.training.group.group import Group
from torchelastic.worker import backward_waits, status_page
from torchelastic.worker.backward_waits import BackwardWaits
from torchelastic.worker.collective_log import LoggedCollective as Shown
from torchelastic.worker.collective_log import read
from torchelastic.worker_counters import stalls


class Hands:
    """A clock that goes on by itself: a second at each look."""

    at = 0.0

    def monotonic(self) -> float:
        self.at += 1.0
        return self.at


@pytest.fixture
def hands(monkeypatch):
    made = Hands()
    monkeypatch.setattr(waits_module, "time", made)
    monkeypatch.setattr(backward_waits, "time", made)
    return made


@pytest.fixture
def waited(hands):
    before = list(stalls.seconds)
    place = stalls.COUNTED.index("peers")
    yield lambda: stalls.seconds[place] - before[place]
    stalls.seconds[:] = type(stalls.seconds)("d", before)


def finish_when_waited_for(operation: AbortableOperation) -> None:
    def finish() -> None:
        poll_for(lambda: "_gate" in vars(operation), what="somebody waits")
        operation.finish(None, None)

    finisher = threading.Thread(target=finish)
    finisher.start()
    operation.wait()
    finisher.join()


def test_the_training_thread_is_counted(waited):
    finish_when_waited_for(AbortableOperation(Waits(), 1))
    assert waited() == 1.0


def test_another_thread_is_not(waited):
    operation = AbortableOperation(Waits(), 1)
    other = threading.Thread(target=finish_when_waited_for, args=(operation,))
    other.start()
    other.join()
    assert waited() == 0.0


def test_wait_for_a_finished_operation_returns_at_once(waited):
    operation = AbortableOperation(Waits(), 1)
    operation.finish(None, None)
    operation.wait()
    assert waited() == 0.0


class Inner:
    """gloo's work, which ends as told when it is waited for."""

    def __init__(self, happens):
        self.happens, self.limits = happens, []

    def wait(self, limit=None):
        self.limits.append(limit)
        if limit is not None:
            self.happens()
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.happens is broken:
            raise RuntimeError("gloo/transport: connection closed")

    def is_completed(self):
        return self.happens in (done, broken)


def done():
    """The operation ends within the limit."""


def broken():
    """A connection breaks within the limit."""


def test_wait_for_a_short_operation_happens_in_gloo(waited):
    waits, inner = Waits(), Inner(done)
    waits.at_once(1, inner, None, soon=True)
    assert inner.limits == [waits_module.SOON]
    assert not waits.under_way
    assert waited() == 1.0


def test_wait_for_an_operation_that_breaks_reports_a_lost_peer():
    with pytest.raises(PeerLostError, match="connection closed"):
        Waits().at_once(1, Inner(broken), None, soon=True)


def test_after_an_abort_nothing_waits_in_gloo():
    waits = Waits()
    inner = Inner(lambda: waits.end(GenerationOver("over")))
    with pytest.raises(GenerationOver):
        waits.at_once(1, inner, None, soon=True)
    assert inner.limits == [waits_module.SOON]


# --- in a script: from the last gradient to the optimizer's step, and nothing else ----------------


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))


@pytest.fixture
def backward(model):
    return lambda: model(torch.ones(1, 3)).sum().backward()


def test_backward_wait_counts_from_the_last_gradient_to_the_optimizer_step(
    hands, waited, model, backward
):
    waits = BackwardWaits([model.parameters()])
    backward()
    assert hands.at == 2.0, "a look for the first parameter and one for the last"
    hands.at += 7.0
    stalls.add("checkpoint", 5.0)  # not counted twice
    waits.before_write()
    assert waited() == 3.0
    waits.before_write()  # a second optimizer waits for nothing
    assert waited() == 3.0


def test_of_several_backwards_the_last_counts(hands, waited, model, backward):
    waits = BackwardWaits([model.parameters()])
    for _ in range(3):
        hands.at += 50.0
        backward()
    waits.before_write()
    assert waited() == 1.0


def test_gradients_that_no_optimizer_takes_up_are_forgotten(hands, waited, model, backward):
    waits = BackwardWaits([model.parameters()])
    backward()
    waits.committed()
    hands.at += 50.0
    waits.before_write()
    assert waited() == 0.0


def test_parameters_that_are_not_trained_are_passed_over_and_shared_ones_noted_once(
    hands, model, backward
):
    model[0].requires_grad_(False)
    BackwardWaits([model.parameters(), model.parameters()])
    backward()
    assert hands.at == 2.0


@pytest.mark.parametrize("fault", ["no answer from rank 1 at 10.0.0.7:4711", ""])
def test_a_call_that_takes_long_fails_with_what_is_found(monkeypatch, fault):
    monkeypatch.setattr(abortable_waits, "IDLE", 0.05)
    monkeypatch.setattr(waits_module, "FAULT_AFTER", 0.01)
    asked, end = threading.Event(), threading.Event()

    def find_fault():
        asked.set()
        return fault

    def block():
        asked.wait()
        return fault or end.wait()

    if fault:
        never = threading.Event()
        with pytest.raises(PeerLostError, match="no answer from rank 1"):
            Waits().call(never.wait, find_fault=find_fault)
        never.set()
    else:
        end.set()
        assert Waits().call(block, find_fault=find_fault) is True


def test_a_fault_that_is_found_when_the_call_has_ended_is_none(monkeypatch):
    """It would be given as the reason of the script's next error."""
    monkeypatch.setattr(waits_module, "FAULT_AFTER", 0.01)
    asked, ended, told = threading.Event(), threading.Event(), threading.Event()

    class Looking(threading.Timer):
        def run(self):
            super().run()
            told.set()

    def find_fault():
        asked.set()
        ended.wait()
        return "no answer from rank 1 at 10.0.0.7:4711"

    monkeypatch.setattr(waits_module.threading, "Timer", Looking)
    waits = Waits()
    assert waits.call(asked.wait, find_fault=find_fault) is True
    ended.set()
    assert told.wait(10)
    assert waits.failure is None


@pytest.mark.parametrize(
    ("world_size", "named"), [(2, "rank 1 at 10.0.0.7:4711"), (4, "10.0.0.7:4711")]
)
def test_a_rank_is_named_only_in_a_group_of_the_whole_world(monkeypatch, world_size, named):
    """In another group rank 1 is some other rank of the world."""
    store = dist.HashStore()
    for rank in range(2):
        store.set(f"0/{rank}", "card")
    monkeypatch.setattr(sockets, "listening_address", lambda card: ("10.0.0.7", 4711))
    monkeypatch.setattr(sockets, "is_silent", lambda address: True)
    assert gloo.silent_peer(store, 0, 2, world_size) == f"no answer from {named}"


def test_a_host_that_drops_packets_is_silent_one_that_refuses_is_not(monkeypatch):
    monkeypatch.setattr(sockets, "ANSWERS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        # A queue that is full drops what comes.
        with socket.create_connection(address):
            assert sockets.is_silent(address)
    assert not sockets.is_silent(address)


@pytest.mark.parametrize(
    ("found", "is_world", "said"),
    [
        (("10.0.0.7", 4711), True, "no answer from rank 1 at 10.0.0.7:4711"),
        (("10.0.0.7", 59000), True, "no answer from ranks 1, 2 at 10.0.0.7:59000"),
        (("10.0.0.7", 4711), False, "no answer from 10.0.0.7:4711"),
        (None, True, ""),
    ],
)
def test_a_group_says_who_does_not_answer(monkeypatch, found, is_world, said):
    """As `rendezvous.suspects` reads it."""
    monkeypatch.setattr(sockets, "unanswered", lambda inodes, seconds: found)
    listens = {("10.0.0.7", 4711): 1, ("10.0.0.7", 4712): 2, ("10.0.0.8", 4711): 3}
    group = SimpleNamespace(
        connections=frozenset(), _ports=sockets.Ports(frozenset(), listens), _is_world=is_world
    )
    assert gloo.OwnedGloo.unanswered(group, 3.0) == said


class Silent:
    """A group of gloo's with a rank that does not answer."""

    def __init__(self, seconds=3.0):
        self.seconds = seconds

    def unanswered(self, seconds):
        return "no answer from rank 1 at 10.0.0.7:4711" if seconds == self.seconds else ""


@pytest.fixture
def world():
    made = Group(store=dist.HashStore(), rank=0, size=2, generation=0, timeout=timedelta(seconds=9))
    made._owned.append(Silent())
    return made


@pytest.mark.parametrize(
    ("case", "fails"),
    [
        ("the same wait twice", True),
        ("another wait", False),
        ("nothing to wait for", False),
        ("the world is over", False),
        ("all answer", False),
    ],
)
def test_a_wait_for_a_rank_that_does_not_answer_ends(world, case, fails):
    waits, operation = world.waits, AbortableOperation(world.waits, 1)
    waits.under_way[1] = operation
    world.look(3.0)
    if case == "another wait":
        waits.under_way = {2: AbortableOperation(waits, 2)}
    elif case == "nothing to wait for":
        waits.under_way = {}
    elif case == "the world is over":
        waits.over = GenerationOver("it is")
    elif case == "all answer":
        world._owned[0].seconds = 0.0
    world.look(3.0)
    assert (waits.failure is not None) is fails
    if fails:
        with pytest.raises(PeerLostError, match="no answer from rank 1"):
            operation.wait()


def test_a_gloo_thread_that_waits_for_a_cpu_is_waited_for(world, monkeypatch):
    """For half a second; a worker that did not would exit."""
    world._silent = []
    world.waits.under_way[1] = AbortableOperation(world.waits, 1)
    now, runs = count(0.0, 0.1), iter([True] * 5 + [False])
    clock = SimpleNamespace(monotonic=lambda: next(now), sleep=lambda seconds: None)
    monkeypatch.setattr(group_module, "time", clock)
    monkeypatch.setattr(world, "_only_stuck", lambda: not next(runs))
    assert world._wait_until_quiet()


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    """It lies on the first node of a world, which another one may not reach."""
    monkeypatch.setattr(waits_module, "FAULT_AFTER", 0.01)
    monkeypatch.setattr(abortable_waits, "IDLE", 0.05)
    monkeypatch.setattr(sockets, "is_silent", lambda address: address == ("fd77::2", 4711))
    never = threading.Event()
    monkeypatch.setattr(group_module, "TCPStore", lambda *args, **options: never.wait())
    with pytest.raises(PeerLostError, match=r"no answer from \[fd77::2\]:4711"):
        group_module._Connecting().connect("fd77::2", 4711, timedelta(seconds=9))
    never.set()


# --- collectives shown to the agent ---------------------------------------------------------------


@pytest.fixture
def memory():
    descriptor = status_page.create()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def shown_world(memory, monkeypatch):
    """The group of a shown_world of one, which shows its collectives."""
    monkeypatch.setattr(abortable_waits, "IDLE", 0.05)
    shown = status_page.StatusPage(memory)
    group = Group(
        store=dist.HashStore(), rank=0, size=1, generation=3, timeout=timedelta(seconds=20)
    )
    group.waits.shown = shown.collectives
    shown.collectives.enter(3)
    group.connect()
    yield group
    group.leave()
    shown.close()


def test_collectives_are_numbered_in_each_group(memory, shown_world):
    other = dist.new_group([0])
    dist.all_reduce(torch.zeros(1))
    dist.broadcast(torch.zeros(1), src=0, group=other)
    dist.barrier()
    seen = read(memory)
    assert seen.generation == 3
    names = {one.group: (one.name, one.number) for one in seen.launched}
    assert names["0"][0] == "barrier"
    assert names["1"] == ("broadcast", 1)
    before = names["0"][1]
    dist.all_gather([torch.zeros(1)], torch.zeros(1))
    assert read(memory).launched[0] == Shown("all_gather", before + 1, "0")
    assert seen.waits is None


def test_collective_is_shown_while_the_training_thread_waits(memory, shown_world):
    dist.all_reduce(torch.zeros(1))
    (last,) = read(memory).launched
    operation = AbortableOperation(shown_world.waits, 99)
    operation.mark = (0, last.number, b"all_reduce")
    seen = []

    def finish():
        poll_for(lambda: "_gate" in vars(operation), what="somebody waits")
        seen.append(poll_for(lambda: read(memory).waits, what="it shows that"))
        operation.finish(None, None)

    finisher = threading.Thread(target=finish)
    finisher.start()
    operation.wait()
    finisher.join()
    assert seen == [last]
    assert read(memory).waits is None


def test_point_to_point_operations_are_not_counted(memory, shown_world):
    dist.all_reduce(torch.zeros(1))
    launched = read(memory).launched
    group = dist.group.WORLD
    assert group._show(5, b"send") == (-1, 0, b"send")
    assert read(memory).launched == launched
