"""Tests with real processes and sockets leave nothing behind, and touch nothing outside."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.etcd import etcd, etcd_on_path, some_etcd
from tests.leaks import Leaks, Snapshot

__all__ = ["etcd", "etcd_on_path", "some_etcd"]

# How long an example takes is the machine's affair, and no failure.
hypothesis.settings.register_profile("torchelastic", deadline=None)
hypothesis.settings.load_profile("torchelastic")

#: Directories whose tests use real processes and sockets.
_REAL = ("browser", "process", "contract", "frameworks")

#: How long what a test has ended may take to be gone, on a busy machine.
_PATIENCE = 10.0


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Own runtime and temporary directories; no process, thread or descriptor afterwards."""
    if request.path.relative_to(Path(__file__).parent).parts[0] not in _REAL:
        yield
        return
    runtime_dir = _private_directories(request)
    before = Snapshot.take()
    yield
    leaks = Leaks(before, mark=f"XDG_RUNTIME_DIR={runtime_dir}\0")
    left = leaks.wait_for_none(_PATIENCE)
    if left:
        leaks.kill_processes()
        pytest.fail("The test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _private_directories(request: pytest.FixtureRequest) -> Path:
    """Short names: the path of a Unix socket may have 107 bytes."""
    tmp_path: Path = request.getfixturevalue("tmp_path")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    runtime_dir, temporary = tmp_path / ".x", tmp_path / ".t"
    runtime_dir.mkdir(mode=0o700)
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it remembers the first answer
    return runtime_dir
