"""Random states and buffers are read and put back exactly, and left for a replacement."""

import logging
import random
import sys

import numpy
import pytest
import torch
from torch import nn

from torchelastic.tensors import rank_private, rng
from torchelastic.tensors.buffers import Buffers
from torchelastic.tensors.rank_private import Private, Publisher
from torchelastic.tensors.tensor_bytes import bytes_of
from torchelastic.worker import status_page as status_pages


def draw():
    return (
        torch.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        numpy.random.randn(),
        numpy.random.randint(1000),
    )


@pytest.mark.parametrize("before", range(2))
def test_random_numbers_drawn_again_are_the_same(before):
    for _ in range(before):  # an odd number of normal deviates leaves one kept for the next
        random.gauss(0, 1)
        numpy.random.randn()
    state = rng.capture()
    assert rng.capture() == state
    first = [draw() for _ in range(300)]  # more than the generators make at once
    assert rng.capture() != state
    rng.restore(state)
    assert [draw() for _ in range(300)] == first


@pytest.mark.parametrize(
    "normal",
    [
        numpy.random.randn,
        lambda: float(torch.randn(1)),
        lambda: float(torch.randn(1, dtype=torch.float64)),
    ],
    ids=["numpy", "torch", "torch, double"],
)
def test_a_deviate_that_is_kept_for_the_next_is_noticed_when_it_is_used_up(normal):
    numpy.random.seed(0)
    torch.manual_seed(0)
    normal()
    kept = rng.capture()
    second = normal()  # takes nothing from the generator
    assert rng.capture() != kept
    rng.restore(kept)
    assert normal() == second


def test_a_deviate_that_torch_keeps_is_noticed_after_seeding_again():
    torch.manual_seed(0)
    torch.randn(2)
    none_kept = rng.capture()
    torch.manual_seed(0)
    torch.randn(1)  # the generator is where it was, and keeps the second
    assert rng.capture().torch == bytes_of(torch.get_rng_state()) != none_kept.torch


def test_a_state_of_torchs_that_is_set_is_noticed():
    torch.manual_seed(1)
    torch.rand(5)
    other = torch.get_rng_state()
    torch.manual_seed(2)
    torch.rand(5)  # the same position, other words
    seen = rng.capture()
    torch.set_rng_state(other)
    assert rng.capture().torch == bytes_of(other) != seen.torch


@pytest.mark.parametrize("unknown", ["numpy before 1.24", "another Python"])
def test_the_memory_of_a_generator_need_not_be_known(monkeypatch, unknown):
    if unknown == "another Python":
        monkeypatch.setattr(rng, "_python_at", None)
    else:
        monkeypatch.delattr(numpy.random, "get_bit_generator")
    asks = rng.RngReader().capture
    for generate in (lambda: None, numpy.random.random, lambda: random.gauss(0, 1)):
        generate()
        assert asks() == rng.capture()
        assert asks() is asks()


def test_numpy_may_be_missing_or_come_late(monkeypatch):
    capture = rng.RngReader().capture
    monkeypatch.delitem(sys.modules, "numpy")
    without = capture()
    assert rng._split(without.others)[1] == b""
    assert capture() is without
    monkeypatch.undo()
    assert capture() == rng.capture()
    numpy.random.random()
    assert capture() == rng.capture()


@pytest.mark.parametrize(
    "generate",
    [random.random, numpy.random.random, lambda: torch.rand(1)],
    ids=["python", "numpy", "torch"],
)
def test_every_single_draw_is_noticed(generate):
    """Also when the generators refill their words, every 312 or 624 draws."""
    seen = rng.capture()
    for _ in range(700):
        generate()
        before, seen = seen, rng.capture()
        assert seen != before
        assert seen.torch == bytes_of(torch.get_rng_state())


def test_another_generator_of_numpys_is_not_kept():
    own = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        assert rng._split(rng.capture().others)[1] == b""
    finally:
        numpy.random.set_bit_generator(own)
    assert rng._split(rng.capture().others)[1] != b""


def test_light_buffers_of_all_types_become_bytes_and_come_back():
    module = nn.Module()
    module.register_buffer("flag", torch.tensor([True, False, True]))
    module.register_buffer("brief", torch.arange(5).to(torch.bfloat16))
    module.register_buffer("whole", torch.tensor(7))
    module.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    module.register_buffer("empty", torch.empty(0))
    buffers = Buffers([module])
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    light = buffers.capture()
    for buffer in module.buffers():
        buffer.zero_()
    assert buffers.restore(light)
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())


def test_buffers_of_another_model_are_left_alone():
    small, large = nn.BatchNorm1d(2), nn.BatchNorm1d(40)
    assert not Buffers([large]).restore(Buffers([small]).capture())


# --- the status page ------------------------------------------------------------------------------


def state(text):
    return Private(rng.Random(text.encode(), b"others"), text.encode() * 2)


def take_steps(publisher, steps, *, generation=0):
    for step in steps:
        publisher.begin((generation, step), state(f"begin {step}"))
        publisher.in_flight((generation, step + 1), state(f"flight {step}"))


def test_a_replacement_finds_the_step_before_this_one_and_the_one_in_flight(status_page):
    publisher = Publisher(status_page)
    take_steps(publisher, range(4))
    publisher.begin((0, 4), state("begin 4"))
    for _ in range(2):  # the beginning counts, not what was in flight; also after the next flight
        assert rank_private.left_behind(status_page, (0, 3)) == state("begin 3")
        assert rank_private.left_behind(status_page, (0, 4)) == state("begin 4")
        publisher.in_flight((0, 5), state("flight 4"))
    assert rank_private.left_behind(status_page, (0, 5)) == state("flight 4")
    assert rank_private.left_behind(status_page, (0, 6)) is None


def test_nothing_is_written_at_the_beginning_of_a_step_when_nothing_was_drawn_since(status_page):
    publisher = Publisher(status_page)
    take_steps(publisher, range(4))
    before = [status_page.held(slot) for slot in range(status_pages.SLOTS)]
    publisher.begin((0, 4), state("flight 3"))
    assert [status_page.held(slot) for slot in range(status_pages.SLOTS)] == before
    publisher.in_flight((0, 5), state("flight 3"))
    assert rank_private.left_behind(status_page, (0, 3)) == state("begin 3")
    assert rank_private.left_behind(status_page, (0, 4)) == state("flight 3")
    assert rank_private.left_behind(status_page, (0, 5)) == state("flight 3")


class Dying:
    """A status page whose worker is killed in the middle of a write."""

    def __init__(self, status_page, at):
        self._status_page, self._left = status_page, at

    def publish(self, slot, version, changing, steady=b""):
        self._left -= 1
        if self._left == 0:
            begin = self._status_page._begin(slot)
            self._status_page._memory[begin] |= 1  # torn
            raise KeyboardInterrupt
        return self._status_page.publish(slot, version, changing, steady)

    def held(self, slot):
        return self._status_page.held(slot)


@pytest.mark.parametrize("at", range(3, 12))
@pytest.mark.parametrize("drawing", [True, False], ids=["drawing between", "not drawing between"])
def test_a_worker_killed_while_it_writes_leaves_what_can_be_needed(status_page, at, drawing):
    publisher, entered = Publisher(Dying(status_page, at)), []

    def take_steps():
        for step in range(20):
            entered.append(step)
            publisher.begin((0, step), state(f"begin {step}" if drawing else f"end {step - 1}"))
            publisher.in_flight((0, step + 1), state(f"end {step}"))

    with pytest.raises(KeyboardInterrupt):
        take_steps()
    step = entered[-1]
    # Its peers can be in the step it is in or, as long as it has launched nothing, one behind.
    for needed in (step - 1, step):
        left = rank_private.left_behind(status_page, (0, needed))
        assert left in (state(f"begin {needed}"), state(f"end {needed - 1}"))


def test_a_later_collective_of_a_step_replaces_what_an_earlier_one_left(status_page):
    publisher = Publisher(status_page)
    publisher.begin((0, 0), state("begin"))
    for text in ("one", "one", "two"):
        publisher.in_flight((0, 1), state(text))
    assert rank_private.left_behind(status_page, (0, 1)) == state("two")


def test_the_same_step_of_an_earlier_generation_will_do_but_not_before_an_exact_one(status_page):
    take_steps(Publisher(status_page), range(3), generation=2)
    assert rank_private.left_behind(status_page, (5, 2)) == state("begin 2")
    assert rank_private.left_behind(status_page, (5, 3)) == state("flight 2")
    Publisher(status_page).begin((5, 2), state("exact"))
    assert rank_private.left_behind(status_page, (5, 2)) == state("exact")


def test_buffers_that_are_too_large_are_left_out_and_that_is_reported_once(
    status_page, caplog, monkeypatch
):
    monkeypatch.setattr(status_pages, "SLOT_LIMIT", 1000)
    publisher = Publisher(status_page)
    large = state("a")._replace(buffers=b"x" * 2000)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            publisher.begin((0, step), large)
            publisher.in_flight((0, step + 1), large)
    assert len(caplog.records) == 1
    left = rank_private.left_behind(status_page, (0, 2))
    assert left is not None
    assert left.buffers == b""


def test_a_replacement_without_buffers_keeps_those_it_was_given():
    module = nn.BatchNorm1d(3)
    buffers = Buffers([module])
    left = rank_private.PrivateStateReader(buffers).read()._replace(buffers=b"")
    module.running_mean.fill_(5)
    assert not rank_private.restore(left, buffers)
    assert module.running_mean.tolist() == [5, 5, 5]
