"""TorchState: its parts, what peers give to each other, checkpoints."""

import io
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from tests.unit.training.undo_support import (
    TRAININGS,
    Interrupted,
    Sampler,
    built,
    outcome,
    stop_at,
    take,
)
from torchelastic.errors import TransferError
from torchelastic.tensors import rng, tensor_tree, transfer
from torchelastic.training import session
from torchelastic.training.state import Torn, holders_of, is_worthless
from torchelastic.training.torch_state import TorchState

# --- parts ----------------------------------------------------------------------------------------


def test_parts_are_found_under_their_names():
    model, sampler = nn.Linear(2, 2), Sampler()
    optimizers = (SGD([model.weight], lr=1.0), SGD([model.bias], lr=2.0))
    state = TorchState(model=model, optimizer=optimizers, sampler=sampler, best=0.5, step=3)
    assert (state.model, state.module, state.optimizer) == (model, model, optimizers)
    assert (state.sampler, state.best, state.step, state.epoch) == (sampler, 0.5, 3, 0)
    assert state.scheduler is None


def test_values_may_be_assigned_and_objects_may_not():
    state = TorchState(model=nn.Linear(1, 1), best=0.5, tracker=Sampler())
    state.best, state.epoch, state.anything = (1, 2), 7, object()
    assert (state.best, state.epoch) == ((1, 2), 7)
    for name in ("model", "tracker"):
        with pytest.raises(AttributeError, match=f"Cannot replace '{name}'"):
            setattr(state, name, None)
    with pytest.raises(TypeError, match="best"):
        state.best = object()


def test_invalid_part_is_refused_by_name():
    unsendable = Sampler()
    unsendable.position = object()
    for given, named in (
        ({"tracker": unsendable}, "position"),
        ({"wrong": object()}, "wrong"),
        ({"wrong": {"deep": [lambda: None]}}, r"wrong\['deep'\]\[0\]"),
        ({"sampler": iter([1])}, "sampler"),
        ({"scheduler": [Sampler(), 3]}, "scheduler"),
        ({"model": Sampler()}, "model"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer"),
        ({"sync": 1}, "sync"),
        ({"_undo": 1}, "_undo"),
        ({"module": nn.Linear(1, 1)}, "module"),
    ):
        with pytest.raises(TypeError, match=named):
            TorchState(**given)


# --- worlds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "holders"),
    [
        ([(0, 3), (0, 3)], (0, 1)),
        ([(0, 3), (0, 4), (-1, 0), (0, 4)], (1, 3)),
        ([(1, 2), (0, 9)], (0,)),
        ([(-1, 0), (-1, 0)], (0,)),
        ([(-2, -1), (-1, 5), (-1, 0)], (1,)),
    ],
)
def test_holders_are_the_ranks_with_the_base(versions, holders):
    assert holders_of(versions, max(versions)) == holders


@pytest.mark.parametrize(
    ("own", "base", "is_whole", "worthless"),
    [
        ((0, 3), (0, 4), True, False),
        ((0, 3), (0, 4), False, True),
        ((-1, 0), (0, 4), True, True),
        ((-2, -1), (0, 4), True, True),
        ((-1, 0), (-1, 5), True, False),
        ((-1, 0), (-1, 5), False, False),
        ((0, 4), (0, 4), False, False),
    ],
)
def test_only_a_state_that_nobody_can_want_is_overwritten_on_the_way(
    own, base, is_whole, worthless
):
    assert is_worthless(own, base, is_whole=is_whole) is worthless


class Wire:
    """Carries one rank's state to another of this process, in the form it has on the network."""

    def __init__(self):
        self.sent = None

    def share(self, world, tree, *, holders, into=None, link=None):
        if world.rank in holders:
            skeleton, tensors = tensor_tree.flatten(tree)
            self.sent = skeleton, [tensor.clone() for tensor in tensors]
            return None
        skeleton, tensors = self.sent
        room = transfer._destination(into)
        specs = tensor_tree.specs(skeleton)
        received = [room(spec).copy_(one) for spec, one in zip(specs, tensors, strict=True)]
        return tensor_tree.restore(skeleton, received)


@pytest.fixture
def wire(monkeypatch):
    made = Wire()
    monkeypatch.setattr(transfer, "share", made.share)
    return made


def enter(state, rank, versions, *, generation=0, status_page=None, copying=None):
    """As the loop does it."""
    world = session.Session(
        rank=rank,
        size=len(versions),
        generation=generation,
        local_rank=rank,
        local_size=len(versions),
        store=None,
        group=SimpleNamespace(before_collective=None, check_collectives=lambda: None),
        versions=tuple(versions),
        ready=(-1,) * len(versions),
        version=versions[rank],
        status_page=status_page,
        copying=copying,
    )
    session.enter(world)
    try:
        state.snapshot()
        state.sync()
    finally:
        session.leave()
    return world


def one_more(state, step, generation):
    """A committed step, with a collective before its write."""
    state.snapshot()
    step(state, lambda: state._undo.before_collective())
    state._committed((generation, state.step + 1))


def trained(name, steps, status_page=None, **options):
    """Alone in the first world, up to this step."""
    state, step = built(name, ddp=False, **options)
    enter(state, 0, [(-1, 0)], status_page=status_page)
    for _ in range(steps):
        one_more(state, step, 0)
    return state, step


def without_random(state):
    return {place: value for place, value in outcome(state).items() if place != "random"}


@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "two optimizers"])
def test_a_newcomer_is_given_everything_and_goes_on_to_the_same_bits(name, wire):
    holder, step = trained(name, 4, copy_before_write=False)
    newcomer, _ = built(name, ddp=False, copy_before_write=False)
    parameters = list(newcomer.module.parameters())
    versions = [(0, 4), (-1, 0)]
    enter(holder, 0, versions, generation=1)
    enter(newcomer, 1, versions, generation=1)
    assert newcomer.step == 4
    assert without_random(newcomer) == without_random(holder)
    assert all(
        one is other for one, other in zip(parameters, newcomer.module.parameters(), strict=True)
    )
    results, seeds = [], rng.capture()
    for state in (holder, newcomer):
        rng.restore(seeds)
        for _ in range(3):
            one_more(state, step, 1)
        results.append(without_random(state))
    assert results[0] == results[1]


def test_sync_of_equal_ranks_sends_nothing(wire):
    state, _ = built("momentum", ddp=False)
    enter(state, 0, [(0, 4), (0, 4)], generation=3)
    assert wire.sent is None
    assert state._version == (3, 4)


def test_first_states_that_differ_are_made_equal(wire):
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.BatchNorm1d(3)
        nn.init.normal_(model.weight)
        states.append(TorchState(model=model, ddp=False))
    for rank, state in enumerate(states):
        enter(state, rank, [(-1, 0), (-1, 0)])
    assert without_random(states[0]) == without_random(states[1])


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_replacement_goes_on_with_what_the_dead_had_drawn(ahead, wire, status_page):
    """Killed at the beginning of a step, or after its last collective with its peers a step on."""
    peer, step = trained("foreach Adam", 3, status_page=status_page)
    peer.snapshot()
    if ahead:
        step(peer, lambda: peer._undo.before_collective())
        peer._committed((0, 4))
    expected = rng.capture()
    buffers = peer.module[1].running_mean.clone()
    peer._undo.enter(0, None)  # from here on it is not the one that died
    replacement, _ = built("foreach Adam", ddp=False)
    torch.manual_seed(77)
    versions = [(0, 3 + ahead), (-1, 0)]
    peer.module[1].running_mean.fill_(9)  # a peer's own, not those of the dead
    enter(peer, 0, versions, generation=1)
    enter(replacement, 1, versions, generation=1, status_page=status_page)
    assert rng.capture() == expected
    assert torch.equal(replacement.module[1].running_mean, buffers)


def test_a_survivor_whose_peers_finished_the_step_follows_with_what_it_had_drawn(wire):
    survivor, step = trained("foreach Adam", 3)
    finished, _ = trained("foreach Adam", 3)
    torch.manual_seed(5)
    begin = survivor.snapshot()
    with pytest.raises(Interrupted):
        step(survivor, stop_at(2))
    drawn = outcome(survivor)["random"]
    survivor.apply(begin)
    one_more(finished, step, 0)
    versions = [(0, 3), (0, 4)]
    enter(finished, 1, versions, generation=1)
    enter(survivor, 0, versions, generation=1)
    assert outcome(survivor)["random"] == drawn
    assert without_random(survivor) == without_random(finished)


def test_a_survivor_stays_as_it_rolled_back_if_nobody_is_further(wire):
    survivor, step = trained("foreach Adam", 1)
    begin = survivor.snapshot()
    before = outcome(survivor)
    with pytest.raises(Interrupted):
        step(survivor, stop_at(2))
    survivor.apply(begin)
    enter(survivor, 0, [(0, 1), (0, 1)], generation=1)
    assert outcome(survivor) == before


def test_a_newcomer_knows_from_its_peers_whether_to_copy_before_it_writes(wire):
    holder, _ = trained("zeroed in place", 1)
    newcomer, _ = built("zeroed in place", ddp=False)
    told, _ = built("zeroed in place", ddp=False, copy_before_write=True)
    assert newcomer._undo.writes.known is None
    for rank, state in enumerate((holder, newcomer, told)):
        enter(state, rank, [(0, 1), (-1, 0), (-1, 0)], generation=1, copying=False)
    assert newcomer._undo.writes.known is holder._undo.writes.known is False
    assert told._undo.writes.copying, "what the script has said stands"


def test_another_model_is_refused(wire):
    holder, other = (
        TorchState(model=nn.Sequential(*(nn.Linear(1, 1) for _ in range(count))), ddp=False)
        for count in (1, 2)
    )
    enter(holder, 0, [(0, 4), (-1, 0)])
    with pytest.raises(TransferError, match="same model"):
        enter(other, 1, [(0, 4), (-1, 0)])


def test_after_another_state_was_loaded_there_is_no_way_back(wire):
    holder, _ = built("momentum", ddp=False)
    newcomer, _ = built("momentum", ddp=False)
    begin = newcomer.snapshot()
    newcomer._load(holder._tree())
    with pytest.raises(Torn, match="loaded"):
        newcomer.apply(begin)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAININGS)
def test_a_checkpoint_holds_everything_but_what_is_private(name):
    saved, step = built(name, copy_before_write=False)
    for _ in range(3):
        take(saved, step)
    stream = io.BytesIO()
    saved.save(stream)
    loaded, _ = built(name, copy_before_write=False)
    stream.seek(0)
    loaded.load(stream)
    assert (loaded.step, loaded._version) == (3, (-1, 3))
    ignored = (".gradients", "random")
    for place, value in outcome(loaded).items():
        if not place.startswith(ignored):
            assert outcome(saved)[place] == value, place


def test_a_checkpoint_gives_the_model_to_whoever_asks_torch_for_it():
    model = nn.Linear(2, 2)
    stream = io.BytesIO()
    TorchState(model=model, table={1: (2, numpy.arange(3))}).save(stream)
    stream.seek(0)
    other = nn.Linear(2, 2)
    other.load_state_dict(torch.load(stream, weights_only=True)["model"])
    assert torch.equal(other.weight, model.weight)


def test_another_file_is_no_checkpoint():
    stream = io.BytesIO()
    torch.save({"model": {}}, stream)
    stream.seek(0)
    with pytest.raises(ValueError, match="not written by a TorchState"):
        TorchState().load(stream)


def test_optimizer_state_of_another_type_than_the_parameters_stays_as_it_is():
    model = nn.Linear(2, 2).bfloat16()
    states = [TorchState(model=model, optimizer=Adam(model.parameters())) for _ in range(2)]
    exact = torch.full((2, 2), 1 / 3)
    states[0].optimizer.state[model.weight] = {"exp_avg": exact, "step": torch.tensor(3.0)}
    states[1]._load(states[0]._tree())
    assert torch.equal(states[1].optimizer.state[model.weight]["exp_avg"], exact)
