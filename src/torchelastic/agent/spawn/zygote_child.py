"""Turn a copy of the zygote into a worker: when `become` returns, it is indistinguishable from
`python -u train.py` started as a plain process."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from io import BufferedReader, FileIO, TextIOWrapper
from typing import Any, NoReturn

from torchelastic import env
from torchelastic.agent.spawn.processes import redirect
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup
from torchelastic.worker import bootstrap

#: What torch begins with in releases that do not seed at random.
CONSTANT_SEED = 67280421310721


def become(descriptors: Sequence[int], agent: int, env_changes: Mapping[str, str | None]) -> None:
    """Take on everything of this worker; exit the process if that fails."""
    try:
        linux.die_with_parent(agent)
        os.setsid()
        request = _read(descriptors[0])
        _take_streams(descriptors[1:4])
        inherited = dict(zip(request["inherited"], descriptors[4:], strict=True))
        _take_environment(request["env"], env_changes, inherited)
        if request["cgroup"]:
            Cgroup(request["cgroup"]).join()
        if request["cpus"] is not None:
            os.sched_setaffinity(0, request["cpus"])
        _take_command(request["command"], request["args"])
        _reseed()
        if "triton" in sys.modules:
            # Python collects nothing that is frozen when it ends, and nanobind, which is below
            # triton, prints a page about whatever is left.
            atexit.register(gc.unfreeze)
    except BaseException as error:
        traceback.print_exc()
        bootstrap.report(error, error.__traceback__)
        os._exit(1)
    bootstrap.attach()
    if request["module"]:
        _run_here(request["module"])


def _read(descriptor: int) -> dict[str, Any]:
    with open(descriptor, "rb") as file:
        file.seek(0)  # the agent, with the same open file, has written to its end
        request: dict[str, Any] = json.load(file)
        return request


def _take_streams(descriptors: Sequence[int]) -> None:
    """Standard input, output and error, and Python's objects for them.

    The objects stay the same, since loggers made by imports hold them, but forget what they have
    found out about the zygote's streams.
    """
    redirect((descriptors[0], descriptors[1], descriptors[2]))
    for descriptor in descriptors:
        os.close(descriptor)
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if isinstance(stream, TextIOWrapper):
            _renew(stream, number)


def _renew(stream: TextIOWrapper, number: int) -> None:
    """Set up one stream as Python does at its start with `-u`."""
    raw = FileIO(number, "wb" if number else "rb", closefd=False)
    raw.name = stream.name
    TextIOWrapper.__init__(
        stream,
        raw if number else BufferedReader(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _take_environment(
    wanted: Mapping[str, str],
    env_changes: Mapping[str, str | None],
    inherited: Mapping[str, int],
) -> None:
    """Set the requested environment, plus the changes that imports have made."""
    values: dict[str, str | None] = {**wanted, **env_changes}
    values.update((name, str(descriptor)) for name, descriptor in inherited.items())
    env.replace({name: value for name, value in values.items() if value is not None})


def _take_command(command: Sequence[str], args: Sequence[str]) -> None:
    """`sys.argv[0]` is as Python wants it to be already."""
    sys.argv[1:] = args
    sys.orig_argv[:] = command
    linux.write_command_line(command)


def _reseed() -> None:
    """Reseed the generators that a new process would seed at random."""
    torch = sys.modules["torch"]
    if torch.initial_seed() != CONSTANT_SEED:
        torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def _run_here(module: str) -> NoReturn:
    """Run a helper module of ours instead of the zygote's program."""
    exitcode = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        exitcode = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        bootstrap.report(error, error.__traceback__)
        exitcode = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exitcode)
