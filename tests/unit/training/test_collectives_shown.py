"""The agent sees what a rank launches and waits for, by number and group."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support import poll_for
from torchelastic.training.group import abortable_waits
from torchelastic.training.group.abortable_waits import AbortableOperation
from torchelastic.training.group.group import Group
from torchelastic.worker import status_page
from torchelastic.worker.collective_log import LoggedCollective as Shown
from torchelastic.worker.collective_log import read


@pytest.fixture
def memory():
    descriptor = status_page.create()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def world(memory, monkeypatch):
    """The group of a world of one, which shows its collectives."""
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


def test_collectives_are_numbered_in_each_group(memory, world):
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


def test_what_the_training_thread_waits_for_is_shown_while_it_waits(memory, world):
    dist.all_reduce(torch.zeros(1))
    (last,) = read(memory).launched
    operation = AbortableOperation(world.waits, 99)
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


def test_what_is_between_two_ranks_is_not_counted(memory, world):
    dist.all_reduce(torch.zeros(1))
    launched = read(memory).launched
    group = dist.group.WORLD
    assert group._show(5, b"send") == (-1, 0, b"send")
    assert read(memory).launched == launched
