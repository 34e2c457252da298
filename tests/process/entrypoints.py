"""Functions for workers. They import next to nothing, so that a test is quick."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def echo(word: str) -> tuple[str, str]:
    """Say it on both streams and return it with the rank."""
    print(f"{word} out")
    print(f"{word} err", file=sys.stderr)
    return word, os.environ.get("RANK", "")


def fail(word: str) -> None:
    raise RuntimeError(word)


def leave(code: int) -> None:
    sys.exit(code)


def die(signum: int) -> None:
    os.kill(os.getpid(), signum)


def large(size: int) -> bytes:
    return b"x" * size


def sleep_for_ever(ready: str) -> None:
    """Until a signal; `ready` is made when that can come."""
    Path(ready).touch()
    time.sleep(3600)


def ignore_sigterm(ready: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever(ready)


def fail_in_generation_0(word: str) -> tuple[str, str, str]:
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if generation == "0":
        raise RuntimeError("only the first time")
    return word, os.environ["RANK"], generation


def fail_on_rank_1(word: str) -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError(word)
    time.sleep(3600)
