"""Ranks as processes forked from one that has imported torch: a test with four takes a second.

The test is their agent, too: it sees the end of one, and tells the others (`when_lost`). gloo alone
does not: a rank that is sending when its peer is lost may wait for the group's whole time-out.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.training.group.group import Group

#: Longer than any test: what is waited for comes, or the test is over.
PATIENCE = timedelta(seconds=60)

#: What the tests run in other processes.
_PRELOADED = ("tests.process.test_ddp_kept", "tests.process.test_transfer")

_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Before a test, what stays: the process that forks, a pipe that the first store makes."""
    _context.set_forkserver_preload(["torch._dynamo", *_PRELOADED])
    forkserver.ensure_running()
    _store()


@contextmanager
def ranks(work: Callable[..., Any], numbers: list[int], *args: Any) -> Iterator[dict[int, Any]]:
    """Run `work(number, port, *args)` in one process for each; what they return, by number.

    None for one that was killed, which the others are told. `port` is that of a store. They end
    together: the connections of one that has ended are not there for others to finish reading.
    """
    store = _store()
    started = {number: _start(work, number, store.port, *args) for number in numbers}
    try:
        yield _gather({answers: number for number, (_, answers) in started.items()})
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


def _gather(waiting: dict[Connection, int]) -> dict[int, Any]:
    """The answers, as they come."""
    found: dict[int, Any] = {}
    while waiting:
        for connection in wait(list(waiting)):
            assert isinstance(connection, Connection)
            number = waiting.pop(connection)
            try:
                found[number] = connection.recv()
            except EOFError:
                found[number] = None
                for other in waiting:
                    other.send(number)
    return found


def _run(work: Callable[..., Any], answer: Connection, *args: Any) -> None:
    global _test
    torch.set_num_threads(1)
    _test = answer
    answer.send(work(*args))
    answered.set()
    # Until the test has all answers, and kills us.
    threading.Event().wait(PATIENCE.total_seconds())
    os._exit(0)


#: In a rank: its connection to the test, and whether the test has its answer.
_test: Connection | None = None
answered = threading.Event()


def when_lost(tell: Callable[[int], None]) -> None:
    """In a rank: have this called, in a thread, with the number of each one that is killed."""
    threading.Thread(target=_hear, args=(_test, tell), daemon=True).start()


def _hear(test: Connection, tell: Callable[[int], None]) -> None:
    while True:
        try:
            lost = test.recv()
        except (EOFError, OSError):  # the test is over
            return
        tell(lost)


def build(port: int, rank: int, size: int, generation: int = 0) -> Group:
    store = dist.TCPStore("127.0.0.1", port)
    return Group.build(store=store, rank=rank, size=size, generation=generation, timeout=PATIENCE)
