"""From a config to an exit code: the guard around the agent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from torchelastic.agent.guard import guarded
from torchelastic.config import OWN_ETCD, Entry, LaunchConfig
from torchelastic.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigError,
    RendezvousRefused,
    TorchElasticError,
    VoteOutdated,
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
                ended = asyncio.run(Agent(config, entry, prints_failure=outcome is None).run())
                break
            except VoteOutdated as error:
                print(f"[torchelastic] {error}", file=sys.stderr)
    except TorchElasticError as error:
        return _fail(error, outcome)
    finally:
        console.drain()
    if outcome is not None:
        outcome.write_text(json.dumps(ended.to_json()))
    return ended.exitcode


def _fail(error: TorchElasticError, outcome: Path | None) -> int:
    """Report an error that ended the job early; return the exit code."""
    from torchelastic.agent.agent import Outcome

    ended = Outcome(_exitcode(error), str(error))
    if outcome is None:
        print(f"torchelastic run: error: {error}", file=sys.stderr)
    else:
        outcome.write_text(json.dumps(ended.to_json()))
    return ended.exitcode


def _exitcode(error: TorchElasticError) -> int:
    return EXIT_USAGE if isinstance(error, ConfigError | RendezvousRefused) else EXIT_FAILED
