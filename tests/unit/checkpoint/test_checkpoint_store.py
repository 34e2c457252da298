"""`CheckpointStore`: what is saved is loaded; what is torn, corrupt or void is passed over."""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
import threading
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit.checkpoint.conftest import Number, after, saved, state, steps
from torchelastic import TorchState, checkpoint, faults
from torchelastic.checkpoint import (
    CheckpointStore,
    get_checkpoint_manager,
    save_job,
    set_checkpoint_manager,
    staging,
)
from torchelastic.checkpoint import checkpoint_store as store_module
from torchelastic.checkpoint.staging import Staging, layout, staged
from torchelastic.checkpoint.storage import safe_pickle
from torchelastic.errors import CheckpointError, ConfigError
from torchelastic.system import memory_limit
from torchelastic.tensors import agreement


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        yield f"file://{tmp_path}/c"
        return
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def test_store_loads_the_saved_tree(open_store, url):
    store = open_store(url)
    assert store.load() is None
    saved(store, 3, 7)
    loaded = open_store(url).load()
    assert loaded.step == 7
    assert loaded.tree["n"] == 7
    assert torch.equal(loaded.tree["model"]["w"], state(7)["model"]["w"])
    assert loaded.own is None
    assert (store.saved_step, steps(store)) == (7, [7, 3])


def test_the_latest_is_named_in_a_file_and_torch_reads_it_without_us(open_store, tmp_path):
    saved(open_store(tmp_path), 3, 5)
    name = (tmp_path / "latest").read_text().strip()
    assert "step5" in name
    assert (tmp_path / name / "commit.json").exists()
    target = {"model": {"w": torch.zeros(4, 3)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no process group
        dcp.load(target, checkpoint_id=tmp_path / name)
    assert torch.equal(target["model"]["w"], state(5)["model"]["w"])


def test_saving_waits_for_no_storage_and_keeps_what_was_then(open_store, tmp_path, monkeypatch):
    store, go = open_store(tmp_path), threading.Event()
    monkeypatch.setattr(store.catalog, "begin", after(go, store.catalog.begin))
    tree = state(1)
    assert store.save(tree, 1)
    tree["model"]["w"].fill_(9)
    go.set()
    store.finish()
    assert store.load().tree["model"]["w"].eq(1).all()


def test_a_large_state_does_not_wait_for_slow_storage(open_store, tmp_path, monkeypatch, caplog):
    """It would take memory for another copy."""
    monkeypatch.setattr(store_module, "LARGE", 1)
    store, go = open_store(tmp_path, writer="thread"), threading.Event()
    monkeypatch.setattr(store.catalog, "begin", after(go, store.catalog.begin))
    assert store.save(state(1), 1)
    assert not store.save(state(2), 2)
    assert "Skipped the checkpoint of step 2: the one before is still being written" in caplog.text
    go.set()
    store.finish()
    saved(store, 3)
    assert steps(store) == [3, 1]


def test_of_small_ones_the_newest_waits_its_turn(open_store, tmp_path, monkeypatch, caplog):
    store, begun, go = open_store(tmp_path), threading.Event(), threading.Event()
    begin = after(go, store.catalog.begin)
    monkeypatch.setattr(store.catalog, "begin", lambda name: begun.set() or begin(name))
    assert store.save(state(1), 1)
    assert begun.wait(30)
    for step in range(2, 6):
        assert store.save(state(step), step)
    go.set()
    store.finish()
    assert steps(store) == [5, 1]
    assert store.load().tree["n"] == 5
    assert len(store._stagings) == 2
    assert caplog.text.count("storage is slower") == 3


def test_old_ones_are_removed(open_store, url):
    store = open_store(url, keep_last=2, keep_every=20)
    saved(store, 10, 20, 30, 40, 50)
    assert steps(store) == [50, 40, 20]


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("/x", {"keep_last": 0}, "must be at least 1"),
        ("/x", {"keep_every": 0}, "0"),
        ("/x", {"writer": "fork"}, "writer is 'fork'"),
        ("nowhere://x", {}, "Cannot store checkpoints at nowhere://x"),
    ],
)
def test_nonsense_is_refused(url, options, told):
    with pytest.raises(ConfigError, match=told):
        CheckpointStore(url, **options)


def test_without_fsspec_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match="pip install fsspec"):
        CheckpointStore("s3://bucket/x")


# --- torn and corrupt -----------------------------------------------------------------------------


def files_of(path):
    name = (path / "latest").read_text().strip()
    return path / name, path / name / "__0_0.distcp"


def cut(path):
    _, data = files_of(path)
    os.truncate(data, data.stat().st_size - 1)
    return "is torn: '__0_0.distcp' has"


def flip(path):
    _, data = files_of(path)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    return "is corrupt: the checksum of '__0_0.distcp'"


def unmark(path):
    directory, _ = files_of(path)
    (directory / "commit.json").unlink()
    return "has no readable commit.json"


def halve_the_marker(path):
    directory, _ = files_of(path)
    marker = directory / "commit.json"
    marker.write_bytes(marker.read_bytes()[:5])
    return "has no readable commit.json"


def lose(path):
    directory, _ = files_of(path)
    (directory / ".metadata").unlink()
    return "is torn: '.metadata' is missing"


@pytest.mark.parametrize(
    "harm", [cut, flip, unmark, halve_the_marker, lose], ids=lambda f: f.__name__
)
def test_one_that_is_not_whole_is_reported_and_passed_over(open_store, tmp_path, caplog, harm):
    saved(open_store(tmp_path), 1, 2)
    told = harm(tmp_path)
    store = open_store(tmp_path)
    assert store.load().step == 1
    assert caplog.text.count(told) == 1
    assert store.load().step == 1
    assert caplog.text.count(told) == 1, "once is enough"
    saved(store, 3)
    assert store.load().step == 3


def test_a_store_with_no_usable_checkpoint_says_that_none_is_loaded(open_store, tmp_path, caplog):
    assert open_store(tmp_path).load() is None
    saved(open_store(tmp_path), 1)
    assert "none is loaded" not in caplog.text, "an empty store is no reason to warn"
    cut(tmp_path)
    assert open_store(tmp_path).load() is None
    assert f"No checkpoint at {tmp_path} can be used: none is loaded." in caplog.text


def test_the_last_good_one_is_not_removed_for_torn_ones(open_store, tmp_path):
    saved(open_store(tmp_path), 1, 2)
    cut(tmp_path)
    store = open_store(tmp_path, keep_last=1)
    store.catalog.tidy()
    assert store.load().step == 1


def test_a_pickle_in_the_metadata_is_not_run(open_store, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    store = open_store(tmp_path)
    saved(store, 1)
    directory, _ = files_of(tmp_path)
    content = pickle.dumps(Evil())
    (directory / ".metadata").write_bytes(content)
    record = next(store.catalog._committed())
    with pytest.raises(CheckpointError, match="Refused to unpickle"):
        store._read(record.name, 1, None, 0)
    assert not (tmp_path / "harm").exists()


def test_nothing_that_runs_may_be_named():
    inside = b"ctorch.distributed.checkpoint.filesystem\nos.system\n"
    for name in (b"cos\nsystem\n", inside, b"ctorch\nload\n", b"cbuiltins\neval\n"):
        with pytest.raises(CheckpointError, match="only plain data"):
            safe_pickle.loads(b"\x80\x04" + name + b".")


def test_a_crash_before_the_marker_leaves_nothing(open_store, url, caplog):
    store = open_store(url)
    saved(store, 1)
    faults.plan("raise@place=checkpoint.write,generation=any")
    store.save(state(2), 2)
    with pytest.raises(CheckpointError, match="Could not write the checkpoint of step 2"):
        store.finish()
    assert steps(store) == [1]
    assert len(store.catalog.storage.directories()) == 1
    saved(store, 3)
    assert steps(store) == [3, 1]


# --- several worlds -------------------------------------------------------------------------------


def test_a_world_that_is_over_writes_nothing_more(open_store, url, caplog):
    old, new = open_store(url), open_store(url)
    old.entered(3, base=0)
    saved(old, 100, generation=3)
    new.entered(4, base=100)
    saved(new, 101, generation=4)
    old.save(state(105), 105, generation=3)
    with pytest.raises(
        CheckpointError, match=r"generation 4 .* the checkpoint of generation 3 is void"
    ):
        old.finish()
    assert steps(new) == [101, 100]
    assert len(new.catalog.storage.directories()) == 2


def test_finish_does_not_raise_for_an_earlier_world_of_a_worker_that_trains_on(open_store, url):
    old, new = open_store(url), open_store(url)
    old.entered(3, base=0)
    new.entered(4, base=0)
    saved(new, 1, generation=4)
    old.save(state(5), 5, generation=3)
    old.entered(4, base=0, saves=False)
    old.finish()
    assert steps(new) == [1]


def test_steps_beyond_the_base_of_a_later_world_are_void(open_store, url, caplog):
    """Their samples are used again, by steps that went another way."""
    old, new = open_store(url), open_store(url)
    saved(old, 110, 120, generation=3)
    new.entered(4, base=115)
    new._claim.ensure()
    assert new.load().step == 110
    assert "is void: a later world redid its steps" in caplog.text
    saved(new, 116, generation=4)
    assert steps(new) == [116, 110]


def test_a_job_started_again_counts_generations_from_0_and_may_write(open_store, url):
    old = open_store(url)
    saved(old, 100, generation=7)
    old.close()
    new = open_store(url)
    loaded = new.load()
    new.entered(0, base=loaded.step)
    saved(new, 101, generation=0)
    assert steps(new) == [101, 100]


def test_store_clears_leftovers_of_killed_writers_in_object_storage(open_store, tmp_path):
    url = f"memory://{tmp_path.name}"
    dead = open_store(url)
    dead.catalog.storage.put("000000-step5-abcdef/__0_0.distcp", b"half")
    store = open_store(url)
    saved(store, 6)
    assert [name[:12] for name in store.catalog.storage.directories()] == ["000001-step6"]


# --- when -----------------------------------------------------------------------------------------


def test_the_automatic_interval_is_reported(open_store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    store = open_store(tmp_path, every="auto")
    assert not store.is_due(1)
    saved(store, 1)
    assert "The next checkpoint is due in" in caplog.text
    assert "time between failures is 14400 s" in caplog.text
    assert not store.is_due(2)


# --- what the loop calls --------------------------------------------------------------------------


def test_before_leaving_it_is_stored_and_waited_for_once(used, caplog):
    caplog.set_level(logging.INFO)
    checkpoint.save_before_leaving(Number(5), 5, 0, grace=30)
    assert checkpoint.load_latest(state := Number()) == 5
    assert state.value == 5
    checkpoint.save_before_leaving(Number(5), 5, grace=30)
    assert "the checkpoint of step 5 is already in storage" in caplog.text
    used.seconds = 100.0
    checkpoint.save_before_leaving(Number(6), 6, grace=30)
    assert "it takes 100.0 s, and" in caplog.text
    assert steps(used) == [5]


def test_leave_saves_again_a_step_whose_checkpoint_is_void(used):
    checkpoint.save(Number(9), 9, generation=0)
    checkpoint.finish()
    checkpoint.entered(1, base=5)
    checkpoint.save_before_leaving(Number(7), 7, 1, grace=30)
    assert steps(used) == [7]


def test_a_leaver_is_not_kept_by_storage_that_fails(used, caplog):
    faults.plan("raise@place=checkpoint.write,generation=any")
    checkpoint.save_before_leaving(Number(5), 5, grace=30)
    assert steps(used) == []
    assert "Could not write" in caplog.text


def test_a_torch_state_is_stored_tensor_by_tensor(used):
    from torchelastic import TorchState

    def make():
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return TorchState(model=model, optimizer=optimizer, best=0.5)

    trained = make()
    trained.model(torch.ones(1, 3)).sum().backward()
    trained.optimizer.step()
    trained.best = 0.25
    checkpoint.save(trained, 1)
    checkpoint.finish()
    fresh = make()
    assert checkpoint.load_latest(fresh) == 1
    assert fresh.best == 0.25
    for mine, theirs in zip(fresh.module.parameters(), trained.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(used.load().tree["model"]["weight"], trained.module.weight)


# --- the guide ------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[3] / "docs/guides/checkpoint.md"


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setting, script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(setting, {})
    assert isinstance(get_checkpoint_manager(), CheckpointStore)
    set_checkpoint_manager(None)
    exec(script, {})
    # Not the one of step 20 for certain: these steps may be faster than the storage.
    assert CheckpointStore("checkpoints/job-2").load().step == 30


# --- the copy that a checkpoint is written from: made behind the training, and never of two ste---


@pytest.fixture
def behind(open_store, tmp_path, monkeypatch):
    """A store that takes any state for a large one, and what was saved of `lasting` tensors."""
    monkeypatch.setattr(store_module, "LARGE", 1)
    return open_store(tmp_path, writer="thread")


def copying_held(store, monkeypatch):
    """Have the thread wait before it copies anything."""
    go = threading.Event()
    monkeypatch.setattr(store, "_finish_copy", after(go, store._finish_copy))
    return go


def large(value):
    return torch.full((1 << 15,), float(value))


def test_store_copies_lasting_tensors_before_their_write(behind, monkeypatch):
    """Nobody has copied it by then: who waits does it, and that is the cost."""
    go, weight, other = copying_held(behind, monkeypatch), large(1), large(1)
    assert behind.save({"w": weight, "b": other}, 1, lasting=[weight])
    other.fill_(2)
    before = behind._blocked
    behind.before_write()
    weight.fill_(2)
    behind.before_write()  # once is enough
    go.set()
    behind.finish()
    found = behind.load().tree
    assert found["w"].eq(1).all()
    assert found["b"].eq(1).all()
    assert behind._measured.blocked == behind._blocked > before


def test_a_state_that_is_written_to_meanwhile_is_not_stored(behind, monkeypatch, caplog):
    """From then on all is copied before save returns."""
    saved(behind, 1)
    go, weight = copying_held(behind, monkeypatch), large(1)
    assert behind.save({"w": weight}, 2, lasting=[weight])
    weight.fill_(2)
    go.set()
    with pytest.raises(CheckpointError, match=rf"checkpoint of step 2 to {behind.url}: parameters"):
        behind.finish()
    assert behind.load().step == 1
    assert behind.save({"w": weight}, 3, lasting=[weight])
    weight.fill_(3)
    behind.finish()
    assert behind.load().tree["w"].eq(2).all()


@pytest.fixture
def no_memory(monkeypatch):
    monkeypatch.setattr(
        memory_limit, "limits", lambda: [memory_limit.Limit("its cgroup", 100, 100)]
    )


def test_without_memory_for_a_copy_training_waits_until_it_is_written(behind, no_memory, caplog):
    """From where it lies: better than no checkpoint at all."""
    weight = large(1)
    assert behind.save({"w": weight}, 1, lasting=[weight])
    assert steps(behind) == [1]
    weight.fill_(2)
    assert behind.load().tree["w"].eq(1).all()
    assert "Training waits until the checkpoint of step 1 is written: No room for" in caplog.text
    assert behind._stagings[0].descriptor == -1


def test_without_memory_storage_that_fails_is_reported_and_training_goes_on(
    behind, no_memory, caplog
):
    faults.plan("raise@place=checkpoint.write,generation=any")
    assert behind.save(state(1), 1)
    assert "Could not write the checkpoint of step 1" in caplog.text
    with pytest.raises(CheckpointError, match="Could not write the checkpoint of step 1"):
        behind.finish()
    saved(behind, 2)
    assert steps(behind) == [2]


def test_a_state_that_is_loaded_is_copied_first(used, monkeypatch):
    """A state that is read back must not get into the checkpoint that is being written."""
    monkeypatch.setattr(used, "_writer", "thread")
    model = torch.nn.Linear(300, 300)
    trained = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    torch.nn.init.ones_(model.weight)
    checkpoint.save(trained, 1)
    checkpoint.finish()
    monkeypatch.setattr(store_module, "LARGE", 1)
    go = copying_held(used, monkeypatch)
    torch.nn.init.zeros_(model.weight)
    checkpoint.save(trained, 2)
    assert checkpoint.load_latest(trained) == 1
    assert model.weight.eq(1).all()
    go.set()
    checkpoint.finish()
    assert checkpoint.load_latest(trained) == 2
    assert model.weight.eq(0).all()


@pytest.mark.slow  # the process that writes imports torch
def test_optimizers_wait_until_checkpoints_have_their_copy(used, monkeypatch):
    """And nothing else has to be done for it; here the process that writes is a real one."""
    monkeypatch.setattr(store_module, "LARGE", 1)
    go = copying_held(used, monkeypatch)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained = TorchState(model=model, optimizer=optimizer)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    weight, average = (
        model.weight.detach().clone(),
        optimizer.state[model.weight]["exp_avg"].clone(),
    )
    checkpoint.save(trained, 1)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    go.set()
    checkpoint.finish()
    assert checkpoint.load_latest(trained) == 1
    assert torch.equal(model.weight, weight)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], average)


# --- one rank of several --------------------------------------------------------------------------


@pytest.fixture
def one_of_two(monkeypatch):
    """This process takes part as rank 1 of 2; what is agreed on is what it says itself."""
    monkeypatch.setattr(store_module, "_place", lambda: (1, 2))
    monkeypatch.setattr(agreement, "largest", lambda *numbers: list(numbers))
    monkeypatch.setattr(agreement, "of_rank_0", lambda _: {"token": "abcdef", "sequence": 7})


def test_a_rank_without_memory_writes_its_part_and_keeps_count(
    open_store, tmp_path, one_of_two, monkeypatch
):
    """The next checkpoint has one name on all ranks."""
    store = open_store(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_limit, "limits", lambda: [memory_limit.Limit("its cgroup", 100, 100)])
        assert store.save(state(1), 1, together=True)
    assert store.save(state(2), 2, together=True)
    store.finish()
    parts = sorted(tmp_path.glob(".new-*/part-1"))
    names = [path.parent.name for path in parts]
    assert names == [".new-000007-step1-abcdef", ".new-000008-step2-abcdef"]


def test_a_rank_whose_copy_was_disturbed_leaves_word(open_store, tmp_path, one_of_two, monkeypatch):
    monkeypatch.setattr(store_module, "LARGE", 1)
    store = open_store(tmp_path, writer="thread")
    go, weight = copying_held(store, monkeypatch), large(1)
    assert store.save({}, 1, own={"w": weight}, together=True, lasting=[weight])
    weight.fill_(2)
    go.set()
    with pytest.raises(CheckpointError, match="Could not write the checkpoint of step 1"):
        store.finish()
    (word,) = tmp_path.glob(".new-*/failed-1")
    assert "changed before optimizer.step" in word.read_text()


def test_rank_0_does_not_wait_for_the_part_of_a_lost_worker(
    open_store, tmp_path, one_of_two, monkeypatch
):
    monkeypatch.setattr(store_module, "_place", lambda: (0, 2))
    store = open_store(tmp_path)
    assert store.save(state(1), 1, together=True)
    store.lost([1])
    with pytest.raises(CheckpointError, match="rank 1 could not write its part: its worker was lo"):
        store.finish()
    store.lost([1])  # nothing is being written
    assert list(tmp_path.glob(".new-*")) == []


def test_a_part_that_is_there_counts_although_its_worker_is_lost(open_store, tmp_path, one_of_two):
    store = open_store(tmp_path)
    assert store.save(state(1), 1, together=True)
    store.finish()
    save_job.give_up_parts(store._part, store.catalog, [1, 2], "lost")
    found = {path.name for path in tmp_path.glob(".new-*/*-?")}
    assert found == {"part-1", "failed-2"}


# --- the copy of a state: what is small at once, the rest by whoever gets to it, and never torn---


MANY = staging.SMALL // 4 + 1


@pytest.fixture
def staging():
    made = Staging()
    yield made
    made.close()


def begin(staging, tensors, lasting=None):
    """Begin to copy; what is in the staging, by name, now and later, and the copying."""
    slots, size = layout(tensors)
    copying = staging.copy(tensors, slots, size, lasting)
    return copying, staged(staging.descriptor, slots)


def test_tensors_are_copied_as_they_are(staging):
    tensors = {
        "empty": torch.empty(0, 3),
        "number": torch.tensor(1.5),
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "turned": torch.arange(6).view(2, 3).t(),
        "complex": torch.tensor([1 + 2j]),
        "large": torch.arange(2.0 * MANY).view(2, MANY),
        "large, turned": torch.arange(2.0 * MANY).view(2, MANY).t(),
        "large, with gaps": torch.arange(4.0 * MANY).view(MANY, 4).t()[::2],
    }
    copying, found = begin(staging, tensors)
    copying.run()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert found[name].untyped_storage().nbytes() == tensor.nbytes, "torch.save writes that"


def test_the_memory_is_used_again(staging):
    begin(staging, {"a": torch.zeros(2 * MANY), "b": torch.zeros(3)})[0].run()
    descriptor = staging.descriptor
    for value in (1.0, 2.0):
        tensors = {"a": torch.full((MANY,), value), "b": torch.full((3,), value)}
        copying, found = begin(staging, tensors)
        copying.run()
        assert staging.descriptor == descriptor
        assert found["a"].eq(value).all()
        assert found["b"].eq(value).all()
    copying, found = begin(staging, {"a": torch.ones(9 * MANY)})
    copying.run()
    assert found["a"].eq(1).all()


def test_small_ones_find_their_slots_again(staging):
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}
    slots, size = layout(tensors)
    for value in range(3):
        staging.copy({name: one.fill_(value) for name, one in tensors.items()}, slots, size)
        found = staged(staging.descriptor, slots)
        assert all(one.eq(value).all() for one in found.values())


def test_staging_copies_only_lasting_tensors_later(staging):
    tensors = {name: torch.ones(MANY) for name in ("parameter", "buffer")}
    tensors["number"] = torch.ones(1)
    lasting = {tensors["parameter"].data_ptr(): tensors["parameter"]}
    copying, found = begin(staging, tensors, lasting)
    assert [name for name, one in found.items() if one.eq(1).all()] == ["buffer", "number"]
    tensors["buffer"].zero_()
    tensors["number"].zero_()
    copying.run()
    assert all(one.eq(1).all() for one in found.values())


def test_a_write_before_its_time_is_noticed_and_one_after_its_end_is_none(staging):
    tensor = torch.ones(MANY)
    copying, found = begin(staging, {"w": tensor}, {tensor.data_ptr(): tensor})
    copying.run()
    tensor.add_(1)
    assert not copying.is_disturbed
    assert found["w"].eq(1).all()
    copying, _ = begin(staging, {"w": tensor}, {tensor.data_ptr(): tensor})
    tensor.add_(1)
    copying.run()
    assert copying.is_disturbed


def test_memory_that_is_not_there_is_not_taken(staging, monkeypatch):
    monkeypatch.setattr(
        memory_limit, "limits", lambda: [memory_limit.Limit("its cgroup", 1000, 900)]
    )
    with pytest.raises(memory_limit.NoRoom, match=r"No room for copies to write checkpoints from"):
        begin(staging, {"w": torch.ones(MANY)})
    assert staging.descriptor == -1
