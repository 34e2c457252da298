"""The process the user sees: it forks the agent, hands signals on, and leaves nothing behind.

Whatever ends the agent, `kill -9` included, its orphans become children of the guard, which is a
subreaper, and die here. If the guard itself is killed, the agent gets `GUARD_LOST_SIGNAL`.
The guard does nothing else and imports next to nothing: little in it can fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NoReturn

from torchelastic.config import OWN_ETCD, Entry, LaunchConfig
from torchelastic.errors import TorchElasticError, VoteOutdated, exitcode_of
from torchelastic.system import cgroup, linux

#: What the agent gets when the guard is gone. Its default action ends a process, which is right
#: for an agent that has not started anything yet; an agent with workers must end those first.
GUARD_LOST_SIGNAL = signal.SIGRTMIN + 6

FORWARDED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)


def run_job(config: LaunchConfig, entry: Entry, *, outcome: Path | None = None) -> int:
    """Run this node's part of a job to its end; `outcome` is where to write how it ended."""
    signals = [signal.Signals[name] for name in config.signals_to_handle]
    try:
        with _with_etcd(config) as complete:
            return guarded(lambda: _run_agent(complete, entry, outcome), also=signals)
    except TorchElasticError as error:
        return _fail(error, outcome)


@contextlib.contextmanager
def _with_etcd(config: LaunchConfig) -> Iterator[LaunchConfig]:
    """The config with the endpoint of a local etcd, if it asks for one.

    The guard owns the server: the agent's children are killed at the end of a generation.
    """
    if config.rdzv_endpoint != OWN_ETCD:
        yield config
        return
    from torchelastic.rendezvous.etcd.local_server import EtcdServer

    with EtcdServer() as server:
        yield dataclasses.replace(config, rdzv_endpoint=server.get_endpoint())


def _run_agent(config: LaunchConfig, entry: Entry, outcome: Path | None) -> int:
    # Imported after the fork: the guard stays small.
    import asyncio

    from torchelastic.agent.agent import Agent
    from torchelastic.agent.telemetry.reporter import set_up_log

    console = set_up_log()
    try:
        while True:
            try:
                agent = Agent(config, entry, prints_failure=outcome is None)
                ended = asyncio.run(agent.run())
                break
            except VoteOutdated as error:
                print(f"[torchelastic] {error}", file=sys.stderr)
    except TorchElasticError as error:
        return _fail(error, outcome)
    finally:
        console.drain()
    if outcome is not None:
        ended.write(outcome)
    return ended.exitcode


def _fail(error: TorchElasticError, outcome: Path | None) -> int:
    """Report an error that ended the job early; return the exit code."""
    exitcode = exitcode_of(error)
    if outcome is None:
        print(f"torchelastic run: error: {error}", file=sys.stderr)
    else:
        from torchelastic.agent.agent import JobOutcome

        JobOutcome(exitcode, str(error)).write(outcome)
    return exitcode


# --- the guard -----------------------------------------------------------------------------------


def is_under_nohup() -> bool:
    """True if the job must survive the end of its terminal: `nohup` ignores SIGHUP."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def guarded(run: Callable[[], int], also: Collection[int] = ()) -> int:
    """Fork an agent that runs `run` and ends with the exit code this returns, guard it, and return
    its exit code, 128+n for signal n. Signals in `FORWARDED` and `also` are handed on to it.

    Only the guard returns from here. The agent leaves without the caller's `finally` blocks and
    exit handlers, so that nothing runs twice.
    """
    _open_standard_streams()
    forwarded = FORWARDED | set(also)
    if is_under_nohup():
        forwarded -= {signal.SIGHUP}
    linux.become_subreaper()
    # Children from before (a shell script's, that ended in `exec torchelastic`) are not ours.
    keep = frozenset(linux.children())
    # With SIGCHLD ignored, as a parent may leave it, the agent's exit code would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    guard = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    agent = os.fork()
    if agent == 0:
        _be_agent(run, guard, before)
    try:
        cgroups = cgroup.prefix_of(agent)
        exitcode = _wait_for(agent, forwarded, keep)
        cgroup.remove_all(cgroups)
        linux.kill_descendants(keep)
        if exitcode < 0:
            _log_killed(-exitcode)
        return exitcode if exitcode >= 0 else 128 - exitcode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _open_standard_streams() -> None:
    """Fill closed descriptors 0 to 2: else a socket gets the number, and a worker prints on it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _be_agent(run: Callable[[], int], guard: int, mask: Collection[int]) -> NoReturn:
    exitcode = 1
    try:
        linux.die_with_parent(guard, GUARD_LOST_SIGNAL)
        linux.become_subreaper()
        # Out of the guard's group: what is sent to that, by a terminal or by `kill`, comes from
        # the guard and must not come twice.
        os.setpgid(0, 0)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Until the agent handles it there is nothing to end but itself: no traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        exitcode = run()
    except SystemExit as end:
        exitcode = _exitcode_of(end)
    except KeyboardInterrupt:
        exitcode = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exitcode)


def _exitcode_of(end: SystemExit) -> int:
    """The exit code Python itself would use."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _wait_for(agent: int, forwarded: Collection[int], keep: Collection[int]) -> int:
    """Hand signals to the agent until it ends; then its exit code, minus a signal that ended it."""
    while True:
        signum = signal.sigwait({*forwarded, signal.SIGCHLD})
        if signum == signal.SIGCHLD:
            ended, status = os.waitpid(agent, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            linux.reap(keep={agent, *keep})
        else:
            os.kill(agent, signum)


def _log_killed(signum: int) -> None:
    """Log that the agent was killed, unless stderr would block: the guard must end."""
    known = signum in list(signal.Signals)
    name = signal.Signals(signum).name if known else f"signal {signum}"
    if select.select((), (2,), (), 0)[1]:
        os.write(
            2, f"[torchelastic] the agent was killed by {name}; its workers are gone\n".encode()
        )
