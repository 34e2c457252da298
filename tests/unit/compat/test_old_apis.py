"""The APIs of 0.1 and 0.2: rendezvous handlers, collectives, samplers, and processes."""

import itertools
import random
import signal
import subprocess
import sys
from collections import Counter

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchelastic.distributed as edist
import torchelastic.rendezvous as rendezvous
from tests.support import SOAK
from torchelastic.distributed.utils import get_rank
from torchelastic.errors import ConfigError
from torchelastic.fault_injection import start_fault_injection_thread
from torchelastic.multiprocessing import Std, start_processes, to_map
from torchelastic.rendezvous import (
    RendezvousHandler,
    RendezvousHandlerFactory,
    RendezvousParameters,
    get_rendezvous_handler,
)
from torchelastic.utils.data import CyclingIterator, ElasticDistributedSampler

# --- rendezvous -----------------------------------------------------------------------------------


def parameters(backend="c10d"):
    return RendezvousParameters(backend, "node1:29400", "job-1", 1, 2)


def test_rendezvous_has_the_names_of_0_2():
    assert rendezvous.__all__ == [
        "RendezvousClosedException",
        "RendezvousException",
        "RendezvousHandler",
        "RendezvousHandlerCreator",
        "RendezvousHandlerFactory",
        "RendezvousNonRetryableError",
        "RendezvousParameters",
        "RendezvousTimeoutException",
        "create_handler",
        "get_rendezvous_handler",
        "register",
    ]
    for name in ("ClosedException", "NonRetryableError", "TimeoutException"):
        found = getattr(rendezvous, f"Rendezvous{name}")
        assert issubclass(found, rendezvous.RendezvousException)


@pytest.mark.parametrize("backend", ["c10d", "static", "etcd", "etcd-v2", "etcd-v3"])
def test_handler_of_a_known_backend_joins_nothing_yet(backend):
    params = parameters(backend)
    handler = get_rendezvous_handler(params)

    assert isinstance(handler, RendezvousHandler)
    assert handler.params is params
    assert (handler.get_backend(), handler.get_run_id()) == (backend, "job-1")
    assert (handler.is_closed(), handler.num_nodes_waiting()) == (False, 0)
    handler.set_closed()
    assert handler.shutdown() is True


def test_factory_registers_each_backend_once():
    factory = RendezvousHandlerFactory()
    factory.register("mine", lambda params: params.run_id)

    assert factory.create_handler(parameters("mine")) == "job-1"
    with pytest.raises(ConfigError, match="'mine' is already registered"):
        factory.register("mine", lambda params: None)
    with pytest.raises(ConfigError, match="needs a name"):
        factory.register("", lambda params: None)


def test_factory_refuses_a_backend_that_is_not_registered():
    with pytest.raises(ConfigError, match=r"'zeus': use c10d, .* or etcd-v3"):
        get_rendezvous_handler(parameters("zeus"))
    with pytest.raises(ConfigError, match="'c10d' is not registered"):
        RendezvousHandlerFactory().create_handler(parameters())


def test_handler_need_not_define_shutdown():
    needed = RendezvousHandler.__abstractmethods__
    made = type("Mine", (RendezvousHandler,), dict.fromkeys(needed, lambda self: None))

    assert made().shutdown() is True


# --- collectives ----------------------------------------------------------------------------------


def test_collectives_of_one_process_return_their_argument():
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


# --- processes that kill themselves ---------------------------------------------------------------


DOOMED = """
import time
from torchelastic.fault_injection import start_fault_injection_thread
start_fault_injection_thread(1.0, 0.01)
time.sleep(60)
"""


def test_process_with_fault_injection_kills_itself():
    ended = subprocess.run([sys.executable, "-c", DOOMED], timeout=60, capture_output=True)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_fault_injection_refuses_a_rate_that_is_no_probability(rate):
    before = random.getstate()
    with pytest.raises(ConfigError, match="must be a probability"):
        start_fault_injection_thread(rate, 1)
    assert random.getstate() == before


# --- data -----------------------------------------------------------------------------------------


def shares(size, world, start, epoch=0):
    """The share of each rank."""
    samplers = [ElasticDistributedSampler(range(size), world, rank, start) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def train(size, worlds, epoch=0):
    """All samples of an epoch, with their world; `worlds` are (ranks, samples for each rank)."""
    seen, start = [], 0
    for world, each in worlds:
        taken = [share[:each] for share in shares(size, world, start, epoch)]
        seen += [item for turn in itertools.zip_longest(*taken) for item in turn]
        start = min(size, start + world * each)
    return seen


@settings(max_examples=25 * SOAK)
@given(
    size=st.integers(1, 60),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), max_size=6),
    epoch=st.integers(0, 3),
)
def test_sampler_loses_no_sample_and_pads_only_the_end(size, worlds, epoch):
    last = 3
    seen = train(size, [*worlds, (last, size)], epoch)
    counts = Counter(seen)
    assert set(counts) == set(range(size))
    assert len(seen) - size < max([last, *(world for world, _ in worlds)])


def test_sampler_gives_all_ranks_equally_many():
    sampler = ElasticDistributedSampler(range(10), 4, 0, start_index=3)
    assert len(sampler) == 2
    assert [len(share) for share in shares(10, 4, 3)] == [2, 2, 2, 2]
    assert [len(share) for share in shares(10, 4, 9)] == [1, 1, 1, 1]
    assert shares(10, 2, 10) == [[], []]


def test_sampler_order_depends_on_the_epoch_alone():
    assert shares(50, 2, 0, epoch=1) != shares(50, 2, 0, epoch=2)
    assert shares(50, 2, 0, epoch=1) == shares(50, 2, 0, epoch=1)


def test_sampler_starts_the_next_epoch_at_0():
    """0.1's skipped the same samples in every later epoch, or failed in the second."""
    sampler = ElasticDistributedSampler(range(10), 1, 0, start_index=8)
    sampler.set_epoch(4)
    assert len(list(sampler)) == 2
    sampler.set_epoch(5)
    assert sorted(sampler) == list(range(10))


@pytest.mark.parametrize("start", [-1, 11])
def test_sampler_refuses_a_start_outside_the_epoch(start):
    with pytest.raises(ValueError, match=f"start_index is {start}"):
        ElasticDistributedSampler(range(10), 1, 0, start)


def test_cycling_iterator_runs_through_the_epochs():
    def items(epoch):
        return [(epoch, item) for item in "ab"]

    assert list(CyclingIterator(3, items, start_epoch=1)) == items(1) + items(2)
    assert list(CyclingIterator(2, items, start_epoch=2)) == []
    iterator = CyclingIterator(1, items)
    assert (next(iterator), next(iterator), next(iterator, None)) == ((0, "a"), (0, "b"), None)


# --- processes ------------------------------------------------------------------------------------


def test_start_processes_needs_an_empty_directory(tmp_path):
    def start(path):
        start_processes("echo", "true", {0: ()}, {0: {}}, str(path))

    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="not empty"):
        start(tmp_path)
    with pytest.raises(NotADirectoryError):
        start(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        start(tmp_path / "missing")


def test_to_map_names_streams_for_every_local_rank():
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.ERR}, 2) == {0: Std.NONE, 1: Std.ERR}
    given = {0: Std.ALL, 1: Std.OUT, 2: Std.ERR}
    assert to_map(given, 2) == {0: Std.ALL, 1: Std.OUT}
