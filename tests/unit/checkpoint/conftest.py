"""What the tests of checkpoints share."""

from __future__ import annotations

import pytest

from torchelastic import checkpoint, faults
from torchelastic.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager


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
    checkpoint.background._runner.wait()
    checkpoint.background._runner.failures.clear()
    checkpoint.background._used = None
