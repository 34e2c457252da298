"""Shared by the tests of checkpoints."""

from __future__ import annotations

import pytest
import torch

from torchelastic import faults
from torchelastic.checkpoint import (
    CheckpointStore,
    FileSystemCheckpointManager,
    saving,
    set_checkpoint_manager,
)


class Number:
    """The smallest state there is."""

    def __init__(self, value=0):
        self.value = value

    def save(self, stream):
        stream.write(str(self.value).encode())

    def load(self, stream):
        self.value = int(stream.read())


@pytest.fixture
def manager(tmp_path):
    """A manager that this process uses; off again afterwards, with no plan of faults."""
    made = FileSystemCheckpointManager(tmp_path / "checkpoints")
    set_checkpoint_manager(made)
    yield made
    faults.plan("")
    set_checkpoint_manager(None)
    made.close()
    saving._runner.wait()
    saving._runner.failures.clear()
    saving._used = None


# --- of stores ------------------------------------------------------------------------------------


def state(value):
    return {"model": {"w": torch.full((4, 3), float(value)), "b": torch.tensor(value)}, "n": value}


@pytest.fixture
def open_store():
    opened = []

    def make(url, **options):
        opened.append(CheckpointStore(url, **options))
        return opened[-1]

    yield make
    faults.plan("")
    for store in opened:
        store.close()


@pytest.fixture
def used(open_store, tmp_path):
    store = open_store(tmp_path)
    set_checkpoint_manager(store)
    yield store
    set_checkpoint_manager(None)
    saving._used = None


def saved(store, *steps, **options):
    for step in steps:
        assert store.save(state(step), step, **options)
        store.finish()


def steps(store):
    return [found.step for found in store.list_checkpoints()]


def after(event, function):
    def wait(*arguments):
        assert event.wait(30)
        return function(*arguments)

    return wait
