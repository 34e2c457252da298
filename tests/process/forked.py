"""Ranks as processes forked from one that has imported torch: a test with four takes a second."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.training.group import Group

#: Longer than any test: what is waited for comes, or the test is over.
PATIENCE = timedelta(seconds=60)

#: What the tests run in other processes.
_PRELOADED = ("tests.process.kept_ddp", "tests.process.sharing")

_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Before a test, what stays: the process that forks, a pipe that the first store makes."""
    _context.set_forkserver_preload(["torch._dynamo", *_PRELOADED])
    forkserver.ensure_running()
    _store()


@contextmanager
def ranks(work: Callable[..., Any], numbers: list[int], *args: Any) -> Iterator[dict[int, Any]]:
    """Run `work(number, port, *args)` in one process for each; what they return, by number.

    None for one that was killed. `port` is that of a store. They end together: the connections of
    one that has ended are not there for others to finish reading.
    """
    store = _store()
    started = {number: _start(work, number, store.port, *args) for number in numbers}
    try:
        yield {number: _answer(answers) for number, (_, answers) in started.items()}
    finally:
        for process, answers in started.values():
            answers.close()
            process.kill()
            process.join()
            process.close()


def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _start(work: Callable[..., Any], number: int, *args: Any) -> tuple[Any, Connection]:
    answers, answer = _context.Pipe()
    process = _context.Process(target=_run, args=(work, answer, number, *args))
    process.start()
    answer.close()
    return process, answers


def _answer(answers: Connection) -> Any:
    try:
        return answers.recv()
    except EOFError:
        return None


def _run(work: Callable[..., Any], answer: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    answer.send(work(*args))
    answer.poll(PATIENCE.total_seconds())  # until the test has all answers, and kills us
    os._exit(0)


def build(port: int, rank: int, size: int, generation: int = 0) -> Group:
    store = dist.TCPStore("127.0.0.1", port)
    return Group.build(store=store, rank=rank, size=size, generation=generation, timeout=PATIENCE)
