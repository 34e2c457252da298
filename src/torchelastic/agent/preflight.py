"""`--preflight`: a command that has to succeed before this node takes part in the training.

A node whose check fails is a member of the job, so that it can host the rendezvous, but it is not
ready: it joins no world and starts no worker. The check is repeated until it succeeds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

from torchelastic import backoff
from torchelastic.agent.failure_report import exit_words
from torchelastic.agent.spawn.run_program import run_program
from torchelastic.errors import SpawnError
from torchelastic.events.failure import last_lines

#: Seconds a check may take.
CHECK_TIMEOUT = 300.0
#: Seconds before the next check; twice as many each time.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
#: Bytes of its output that are kept, and lines of it that are shown.
OUTPUT_BYTES, LINES_SHOWN = 64 * 1024, 5


async def until_passed(
    command: str, env: Mapping[str, str], helpers: set[int], on_failure: Callable[[str, str], None]
) -> None:
    """Repeat the check until it succeeds. `on_failure` receives how it failed, and the whole
    sentence for people."""
    failures = 0
    while (problem := await check(command, env, helpers)) is not None:
        failures += 1
        how, output = problem
        seconds = pause(failures)
        shown = "".join(f"\n  {line}" for line in output[-LINES_SHOWN:])
        again = f"this node stays out of training; the next check is in {seconds:g} s"
        said = f" Last lines of its output:{shown}" if shown else " It printed nothing."
        on_failure(how, f"The --preflight check {how}: {again}.{said}")
        await asyncio.sleep(seconds)


def pause(failures: int) -> float:
    """Seconds until the next check after `failures` failed ones.

    >>> [pause(failures) for failures in (1, 2, 3, 99)]
    [5.0, 10.0, 20.0, 300.0]
    """
    return backoff.pause(failures, FIRST_PAUSE, LONGEST_PAUSE)


async def check(
    command: str, env: Mapping[str, str], helpers: set[int]
) -> tuple[str, tuple[str, ...]] | None:
    """Run the command once: None if it succeeds, else how it failed and its last lines."""
    output = bytearray()
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    def read() -> None:
        """Take what there is, without waiting: its children may hold the other end open."""
        try:
            while data := os.read(ours, OUTPUT_BYTES):
                output.extend(data)
                del output[:-OUTPUT_BYTES]
            loop.remove_reader(ours)
        except BlockingIOError:
            return

    loop = asyncio.get_running_loop()
    loop.add_reader(ours, read)
    try:
        with open(os.devnull, "rb", buffering=0) as null, os.fdopen(theirs, "wb") as given:
            streams = (null.fileno(), given.fileno(), given.fileno())
            shell = ["/bin/sh", "-c", command]
            exitcode = await run_program(shell, env, streams, helpers, CHECK_TIMEOUT)
        read()
    except SpawnError as error:
        return f"could not be started ({error})", ()
    finally:
        loop.remove_reader(ours)
        os.close(ours)
    if exitcode == 0:
        return None
    how = (
        f"took longer than {CHECK_TIMEOUT:g} s"
        if exitcode is None
        else f"failed ({exit_words(exitcode)})"
    )
    return how, last_lines(output.decode(errors="replace"))
