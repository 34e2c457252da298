"""Who has a state of another form than the freshest is told what is different."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from torchelastic import TorchState
from torchelastic.errors import UnfitError
from torchelastic.tensors.module_state import form_number
from torchelastic.training import compatibility
from torchelastic.training.group.abortable_waits import GenerationOver, Waits
from torchelastic.training.session import Session

LINEAR = (("parameter 'weight'", "float32 of shape (2, 3)"), ("the part 'epoch'", "a value"))


@pytest.mark.parametrize(
    ("own", "others", "says"),
    [
        (
            [("a", "large"), ("b", "x")],
            [("a", "small"), ("b", "x")],
            "a is large on this worker and small on the others",
        ),
        ([("a", ""), ("b", "")], [("a", "")], "b exists on this worker, not on the others"),
        ([("a", "")], [("a", ""), ("b", "")], "b exists on the others, not on this worker"),
        (
            [("a", ""), ("b", "")],
            [("b", ""), ("a", "")],
            "this worker has a, the others b in its place",
        ),
        ([], [("a", "")], "a exists on the others, not on this worker"),
    ],
)
def test_the_first_difference_is_reported(own, others, says):
    assert form_number(own) != form_number(others)
    assert says in compatibility._sentence(own, others)


def test_equal_forms_have_equal_numbers_that_fit_into_an_integer_of_torchs():
    assert form_number(LINEAR) == form_number([tuple(line) for line in LINEAR])
    assert 0 < form_number(LINEAR) < 2**63
    assert form_number(()) == 0


def state(features=3, optimizer=torch.optim.SGD, **more):
    model = nn.Linear(features, 2)
    return TorchState(model=model, optimizer=optimizer(model.parameters(), lr=0.1), **more)


def test_a_torch_state_tells_what_must_be_the_same():
    usual = form_number(state()._form())
    assert form_number(state()._form()) == usual
    others = [
        state(features=4),
        state(optimizer=torch.optim.Adam),
        state(best=1),
        TorchState(model=nn.Linear(3, 2).double()),
    ]
    assert usual not in [form_number(other._form()) for other in others]


def test_form_stays_the_same_during_training():
    made = state(best=1)
    before = made._form()
    made.model(torch.ones(3)).sum().backward()
    made.optimizer.step()
    made.best, made.epoch = 2.5, 3
    assert made._form() == before


# --- in a world ----------------------------------------------------------------------------------

WIDE = (("parameter 'weight'", "float32 of shape (4, 3)"), ("the part 'epoch'", "a value"))
FRESH, TRAINED = (-1, 0), (2, 7)


def world(store, rank, *forms, trained=(0,)):
    """What the worker of a rank sees of a world whose workers have these forms."""
    return Session(
        rank=rank,
        size=len(forms),
        generation=3,
        local_rank=0,
        local_size=1,
        store=store,
        group=SimpleNamespace(waits=Waits()),
        versions=tuple(TRAINED if at in trained else FRESH for at in range(len(forms))),
        ready=(-1,) * len(forms),
        version=FRESH,
        forms=tuple(form_number(form) for form in forms),
    )


def verdict(store, rank, *forms, **more):
    """The error that ends the world for a rank, None if nothing does."""
    try:
        compatibility.check(world(store, rank, *forms, **more), forms[rank])
    except (UnfitError, GenerationOver) as error:
        return error
    return None


def test_check_of_equal_forms_stops_no_worker():
    store = HashStore()
    assert [verdict(store, rank, LINEAR, LINEAR, LINEAR) for rank in range(3)] == [None] * 3
    assert store.num_keys() == 0
    assert verdict(store, 0, (), ()) is None, "states that say nothing of their form are alike"


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_check_fails_the_worker_that_differs_from_the_freshest(holder):
    store, odd = HashStore(), (holder + 1) % 3
    forms = [WIDE if rank == odd else LINEAR for rank in range(3)]
    found = {}
    for rank in (holder, (holder + 2) % 3, odd):
        found[rank] = verdict(store, rank, *forms, trained=(holder,))
    assert isinstance(found.pop(odd), UnfitError)
    said = f"Rank {odd} has an incompatible state."
    assert [str(error) for error in found.values()] == [said, said]


def test_check_compares_with_trained_workers_even_if_they_are_few():
    """Three newcomers with another model do not outvote the one who has the training."""
    store = HashStore()
    found = [verdict(store, rank, LINEAR, WIDE, WIDE, WIDE) for rank in range(4)]
    assert [type(error) for error in found] == [GenerationOver, *[UnfitError] * 3]


def test_check_names_the_different_parameter():
    store = HashStore()
    verdict(store, 0, LINEAR, WIDE)
    assert str(verdict(store, 1, LINEAR, WIDE)) == (
        "This worker's state differs from the other workers': parameter 'weight' is float32 of "
        "shape (4, 3) on this worker and float32 of shape (2, 3) on the others. Start all workers "
        "with the same script and arguments."
    )


def test_check_without_the_form_of_others_fails_all_the_same(monkeypatch):
    monkeypatch.setattr(compatibility, "FORM_TIMEOUT", timedelta(milliseconds=1))
    error = verdict(HashStore(), 1, LINEAR, WIDE)
    assert isinstance(error, UnfitError)
    assert "workers': the difference is unknown. Start all" in str(error)


def test_the_end_of_the_world_ends_its_wait_for_that():
    here = world(HashStore(), 1, LINEAR, WIDE)
    ending = threading.Timer(0.01, here.group.waits.end, [GenerationOver("a peer has failed")])
    ending.start()
    with pytest.raises(GenerationOver, match="a peer has failed"):
        compatibility.check(here, WIDE)
    ending.join()
    here.store.set("form-3", "[]")  # frees the thread that still waits
