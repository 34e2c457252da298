"""Shared by the worker scripts of these tests: `SCRIPT LINES ORDERS [key=value ...]`. No torch.

LINES is a directory for what they tell, a line of JSON each; ORDERS has what they are told, files
whose name or content says what to do (`tests.process.jobs.Job`).
"""

import json
import os
import sys
import time
from pathlib import Path

LINES, ORDERS = map(Path, sys.argv[1:3])
KEYS = dict(text.partition("=")[::2] for text in sys.argv[3:])
#: Of a process that is started anew in each generation; in-process workers ask their session.
RANK, SIZE, GENERATION = (
    int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
)
#: What each line says of such a process.
HERE = {"generation": GENERATION, "rank": RANK, "world_size": SIZE}

_lines = open(LINES / f"{GENERATION}-{RANK}-{os.getpid()}", "a", buffering=1)  # noqa: SIM115


def write(event: str, **more: object) -> None:
    _lines.write(json.dumps({"event": event, "pid": os.getpid(), **more}) + "\n")


def is_ordered(name: str) -> bool:
    return (ORDERS / name).exists()


def wait_for_order(name: str) -> None:
    while not is_ordered(name):
        time.sleep(0.005)
