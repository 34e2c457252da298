"""`CheckpointStore`: what is saved is loaded; what is torn, corrupt or void is passed over."""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support import poll_for
from tests.unit.checkpoint.conftest import Number, after, saved, state, steps
from torchelastic import checkpoint, faults
from torchelastic.checkpoint import (
    CheckpointStore,
    get_checkpoint_manager,
    set_checkpoint_manager,
)
from torchelastic.checkpoint import checkpoint_store as store_module
from torchelastic.checkpoint.catalog import Catalog
from torchelastic.checkpoint.storage import safe_pickle
from torchelastic.checkpoint.storage.storage import LocalStorage
from torchelastic.errors import CheckpointError, ConfigError


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
    with pytest.raises(ConfigError, match=r"pip install 'torchelastic\[fsspec\]'"):
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


def test_an_old_world_that_comes_late_does_not_keep_the_new_one_out(open_store, url):
    old, new = open_store(url), open_store(url)
    new.entered(4, base=0)
    saved(new, 10, generation=4)
    old.entered(3, base=0)
    poll_for(lambda: old._claim._taken, what="the fence")
    saved(new, 11, generation=4)
    assert steps(new)[0] == 11
    old.save(state(5), 5, generation=3)
    with pytest.raises(CheckpointError, match="void"):
        old.finish()


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


def test_failures_make_it_shorter(open_store, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module.interval, "SHORTEST_INTERVAL", 0.0)
    intervals = []
    for generation in range(3):
        store = open_store(tmp_path, every="auto")  # of a new process, as in a script
        store.entered(generation, generation)
        saved(store, generation + 1, generation=generation)
        store._measured = replace(store._measured, blocked=1.0, written=0.0)
        store.is_due(generation + 2)
        intervals.append(store._pace.seconds)
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > intervals[-1]


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


# --- storage that fails ---------------------------------------------------------------------------


class EveryThirdFails(LocalStorage):
    """Fails at every third write, at its end."""

    def __init__(self, path):
        super().__init__(path)
        self.writes = 0

    def writer(self, path):
        self.writes += 1
        if self.writes % 3 == 0:
            raise OSError(5, "Input/output error", path)
        return super().writer(path)


def test_storage_that_fails_every_third_time(open_store, tmp_path, caplog):
    store = open_store(tmp_path, keep_last=2)
    store.catalog = Catalog(EveryThirdFails(tmp_path), keep_last=2)
    good = []
    for step in range(1, 13):
        store.save(state(step), step)
        try:
            store.finish()
        except CheckpointError:
            assert good, "the first one is good"
            assert store.load().step == good[-1], "the one before stays"
        else:
            good.append(step)
    assert 3 < len(good) < 12
    assert steps(store) == good[-1:-3:-1]
    assert caplog.text.count("Could not write") == 12 - len(good)
    assert list(tmp_path.glob(".new-*")) == []


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
