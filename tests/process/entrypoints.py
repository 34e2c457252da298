"""Functions for workers. They import next to nothing, so that a test is quick."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def echo(word: str) -> tuple[str, str]:
    """Say it on both streams and return it with the rank."""
    print(f"{word} out")
    print(f"{word} err", file=sys.stderr)
    return word, os.environ.get("RANK", "")


def sleep_for_ever(ready: str) -> None:
    """Until a signal; `ready` is made when that can come."""
    Path(ready).touch()
    time.sleep(3600)


def fail_in_generation_0(word: str) -> tuple[str, str, str]:
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if generation == "0":
        raise RuntimeError("only the first time")
    return word, os.environ["RANK"], generation


def fail_on_rank_1(word: str) -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError(word)
    time.sleep(3600)
