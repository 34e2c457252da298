"""Whether ranks enter a collective never depends on what one process alone remembers.

In `torchelastic.train` the processes of a world are not equally old: a replacement has seen nothing
of the steps before. If an old and a new process decide differently whether a checkpoint is due, one
waits in a collective that the other never enters.
"""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchelastic
from tests.unit.checkpoint.conftest import open_store, state
from tests.unit.snapshot.cast import Ranks
from torchelastic.checkpoint import checkpoint_store, saving
from torchelastic.training import coordinator, session, stored_state
from torchelastic.training.sharded.between import Buckets
from torchelastic.training.torch_state import TorchState
from torchelastic.worker import leaving

__all__ = ["open_store"]

PACKAGE = Path(torchelastic.__file__).parent
#: The functions that send something to other ranks, wherever they are defined.
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "new_group"),
    *("allreduce", "allgather", "tell_all", "gather", "least", "all_of_them", "extremes"),
    *("begin_all_to_all", "begin_all_gather", "begin_broadcast", "full_tensor", "sent"),
    *("largest", "of_rank_0", "share", "quick_group", "search_together", "tell_each_other"),
}

#: Why all ranks call it at the same time.
SENDS = "it is the collective; its callers decide"
ENTRY = "once in every world, by all"
FACTS = "decided from what all have told each other when the world began"
VOTE = "decided by an earlier collective"
STEP = "decided by the number of the step, or of the commit in a script's generation"
SHARDED = "in every commit of sharded state"
USER = "the script calls it"

#: Every function that calls a collective. A new one belongs here, with the reason why an old and a
#: new process always call it together.
CALLERS = {
    "checkpoint/saving.py": {"save_before_leaving": VOTE},
    "checkpoint/checkpoint_store.py": {
        "_schedule": "in the first `is_due(together=True)` of a generation, which all ranks call",
        "_may_begin": "in every `save(together=True)`, which all ranks call",
        "_agree_on_names": VOTE,
        "_newest_of_rank_0": "in every `load(together=True)`",
    },
    "checkpoint/checkpoint_util.py": {"_anyone": USER},
    "compat/collectives.py": {
        "_broadcast": USER,
        "all_gather_return_max_long": USER,
        "broadcast_binary": USER,
        "broadcast_model": USER,
    },
    "snapshot/keeper.py": {
        "_all_may_begin": SHARDED,
        "_all_settled": VOTE,
        "_keep_for_others": VOTE,
        "_restore": ENTRY,
        "save_at_end": VOTE,
    },
    "snapshot/pieces.py": {"_tell_each_other": VOTE, "find_shards": VOTE},
    "snapshot/plain_parameters.py": {"check": STEP},
    "snapshot/restore.py": {
        "_share": VOTE,
        "_shards_from_storage": VOTE,
        "_tell_each_other": ENTRY,
        "check": VOTE,
        "from_storage": VOTE,
        "run": ENTRY,
    },
    "snapshot/search.py": {"search_together": FACTS, "tell_each_other": ENTRY},
    "snapshot/leave.py": {"_hand_over": VOTE, "bring_to_safety": VOTE},
    "tensors/agreement.py": {
        "_broadcast": SENDS,
        "all_of_them": SENDS,
        "extremes": SENDS,
        "gather": SENDS,
        "largest": SENDS,
        "least": SENDS,
        "quick_group": SENDS,
    },
    "training/coordinator.py": {"_gather": STEP, "barrier": USER},
    "training/audit.py": {
        "_samples": "drawn from the step, who runs what, and who is new, which `enter` tells all",
        "_wait_for_next_world": VOTE,
        "differing": "at the end of a loop with audits",
        "judge": VOTE,
    },
    "training/fixed_steps.py": {
        "_loss_of": "at the end of every loop over micro-batches, by all of a replica",
        "_measure": STEP,
        "_tell_group": SENDS,
        "end": "at the end of every loop over micro-batches, also of a rank without any",
        "enter": ENTRY,
        "same_beginning": "in `restore` of a script, if no rank has a state",
        "sent": SENDS,
        "take": "after every micro-batch, by all of a replica, which run the same ones",
    },
    "training/fixed_sums.py": {"_gather": SENDS, "_launch": SENDS},
    "training/group/ddp.py": {
        "_broadcast": "once in every world, and in the forward after the first backward"
    },
    "training/group/gloo.py": {"allreduce": SENDS},
    "training/group/group.py": {"tell_all": SENDS},
    "training/recovery.py": {
        "_candidates": FACTS,
        "_gather": FACTS,
        "all_gather": SENDS,
        "run": FACTS,
    },
    "training/loop.py": {"_end_after_bad_step": VOTE},
    "training/state_checks.py": {"compare": STEP},
    "training/step_judge.py": {
        "_global_norm": "once for each backward of a step, if the form has local gradients",
        "_take_loss": USER,
    },
    "training/session.py": {"exchange": ENTRY},
    "training/sharded/between.py": {"average": "in every backward that reduces gradients"},
    "training/sharded/sharding.py": {"_join_all": "once in every step", "complete": FACTS},
    "training/torch_state.py": {
        "_receive": FACTS,
        "digest": USER,
        "_response": "after a bad step, which all judge alike by equal numbers",
    },
    "training/stored_state.py": {
        "is_wanted_by_any": "after every step, if user code may ask for checkpoints",
        "must_save_together": "at the end of a world that ends between two steps",
    },
}


def callers(path: Path) -> set[str]:
    """The functions of a file that call a collective."""
    found = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {getattr(one, "attr", getattr(one, "id", "")) for one in called}
            found |= {function.name} if names & COLLECTIVES else set()
    return found


def test_every_caller_of_a_collective_is_listed_with_the_reason_why_all_ranks_call_it():
    found = {}
    for package in ("training", "snapshot", "tensors", "checkpoint", "data", "compat"):
        for path in (PACKAGE / package).rglob("*.py"):
            if names := callers(path):
                found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == {path: set(reasons) for path, reasons in CALLERS.items()}


# --- one old and one new process -----------------------------------------------------------------


@pytest.fixture
def two(monkeypatch):
    made = Ranks(monkeypatch)
    monkeypatch.setattr(checkpoint_store, "_place", lambda: (made.rank, 2))
    monkeypatch.setattr("torch.distributed.barrier", lambda: made.all("barrier", None))
    monkeypatch.setattr(coordinator, "_gather", lambda rate: made.all("rates", rate))
    return made


def generation(monkeypatch, number):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))


def train(two, stores, steps):
    """The steps of which a checkpoint was due; the same on both ranks."""

    def work(rank):
        store, due = stores[rank], []
        for step in steps:
            if store.is_due(step, together=True):
                store.save(state(step), step, together=True)
                store.wait()
                due.append(step)
        return due

    first, second = two.run(work)
    assert first == second
    return first


@pytest.mark.parametrize("new", [0, 1], ids=["rank-0-is-new", "rank-1-is-new"])
@pytest.mark.parametrize("base", [5, 7, 8, 9])
@pytest.mark.parametrize("every", [8, "auto", "2s"])
def test_a_checkpoint_is_due_on_a_new_and_an_old_rank_at_the_same_steps(
    two, open_store, tmp_path, monkeypatch, every, base, new
):
    stores = [open_store(tmp_path, every=every, patience=5.0) for _ in range(2)]
    generation(monkeypatch, 0)
    assert train(two, stores, range(1, 10))
    stores[new] = open_store(tmp_path, every=every, patience=5.0)
    generation(monkeypatch, 1)
    due = train(two, stores, range(base + 1, 18))
    if every == 8:
        assert due == [step for step in (8, 16) if step > base]


def test_rank_0_that_begins_a_generation_twice_agrees_on_names_with_the_others(
    two, open_store, tmp_path, monkeypatch
):
    """`restore()` a second time: only rank 0 forgets the number of the next checkpoint."""
    stores = [open_store(tmp_path, every=2, patience=5.0) for _ in range(2)]
    generation(monkeypatch, 0)
    assert train(two, stores, range(1, 3)) == [2]
    stores[0].entered(0, 2)
    assert train(two, stores, range(3, 5)) == [4]
    assert [one.step for one in stores[0].list_checkpoints()] == [4, 2]


SHARDED_WORLD = SimpleNamespace(replica=object(), rank=0, generation=0)


@pytest.mark.parametrize(
    ("wants", "all_of_them"),
    [((False, False), False), ((True, False), True), ((False, True), True), ((True, True), True)],
)
def test_a_checkpoint_that_user_code_of_one_rank_wants_is_written_by_all(two, wants, all_of_them):
    found = two.run(lambda rank: stored_state.is_wanted_by_any(SHARDED_WORLD, wants[rank]))
    assert found == [all_of_them] * 2


@pytest.mark.parametrize("stored", [None, 4, 3])
def test_leaving_ranks_write_the_last_step_together_or_not_at_all(
    two, open_store, tmp_path, monkeypatch, stored
):
    """Rank 0 alone knows which step is in storage."""
    stores = [open_store(tmp_path) for _ in range(2)]
    stores[0].saved_step, stores[1].seconds = stored, 2.0
    saved = []
    monkeypatch.setattr(stored_state, "leaving", lambda: leaving.LeaveNotice("test", 30.0))
    monkeypatch.setattr(saving, "save_together", lambda *_: saved.append(two.all("save", None)))
    # Each rank is a process: its manager is its own.
    monkeypatch.setattr(saving, "get_checkpoint_manager", lambda: stores[two.rank])
    save = two.run(lambda rank: stored_state.save_together_and_wait(SHARDED_WORLD, None, 4))
    assert save == [None, None]
    assert len(saved) == (0 if stored == 4 else 2)


def test_progress_rates_are_compared_at_the_same_steps(two, monkeypatch):
    """The new process has seen one step of three."""
    monkeypatch.setattr(coordinator.CoordinatorP2P, "MONITOR_PROGRESS_FREQ", 2)
    stats = SimpleNamespace(get_progress_rate=lambda: 1.0)
    made = [object.__new__(coordinator.CoordinatorP2P) for _ in range(2)]
    here = threading.local()
    monkeypatch.setattr(session, "current", lambda: here.session)

    def work(rank):
        made[rank].is_worker_straggler = False
        for step in range(1, 4):
            here.session = SimpleNamespace(version=(0, step), rank=rank)
            if step > 1 or rank == 0:
                made[rank].monitor_progress(None, stats)
        return made[rank].last_relative_prog_rate

    assert two.run(work) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("known", "agreed"),
    [
        ((None, None), None),
        ((False, None), False),
        ((None, True), True),
        ((False, True), True),  # one was interrupted before the collective that the other launched
        ((True, True), True),
    ],
)
def test_all_ranks_copy_before_they_write_or_none(known, agreed):
    """It decides where in a step the joint all-reduce is."""
    numbers = [[0, 3, 7, -1, -1 if one is None else int(one)] for one in known]
    group = SimpleNamespace(tell_all=lambda mine: [list(mine), *numbers[1:]])
    facts = session.exchange(group, (0, 3), 7, copying=known[0])
    assert facts.versions == ((0, 3), (0, 3))
    assert facts.copies is agreed


def test_gradients_are_averaged_between_replicas_whatever_was_trained_before():
    """An old worker has trained what the script has frozen since; a new one never did."""
    made = []
    for was_trained in (True, False):
        layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        layers[0].requires_grad_(was_trained)
        sizes: list[int] = []
        buckets = Buckets(
            layers.parameters(), lambda one, sizes=sizes: sizes.append(one.numel()), lambda: True
        )
        layers[0].requires_grad_(False)
        layers[0].weight.grad = torch.zeros(2, 2)  # as the others have it
        buckets.begin()
        layers[1](torch.ones(1, 2)).sum().backward()
        made.append(sizes)
    assert made == [[4], [4]]


def test_a_checkpoint_leaves_old_and_new_workers_without_gradients():
    old, new = (TorchState(model=nn.Linear(1, 1), ddp=False) for _ in range(2))
    for one in (old, new):
        assert one._undo.gradients.parameters
    old.module.weight.grad = torch.zeros(1, 1)
    stored = new._stored()
    for one in (old, new):
        one._load_stored(stored)
        assert one.module.weight.grad is None


def test_a_worker_that_would_reduce_other_gradients_is_incompatible():
    old, new = (TorchState(model=nn.Linear(1, 1)) for _ in range(2))
    assert old._form() == new._form()
    new.module.bias.requires_grad_(False)
    assert old._form() != new._form()
    assert old._form_of_parts() == new._form_of_parts(), "a snapshot of a script fits all the same"
