"""The examples of docs/guides/checkpoint.md run."""

from __future__ import annotations

import re
from pathlib import Path

from torchelastic.checkpoint import (
    CheckpointStore,
    get_checkpoint_manager,
    set_checkpoint_manager,
)

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
