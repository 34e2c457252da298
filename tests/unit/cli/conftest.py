import time
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed time, so that a busy machine does not change what a test reads."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
