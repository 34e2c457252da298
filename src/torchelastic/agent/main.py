"""From a config to an exit code: the guard around the agent."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from torchelastic.agent.guard import guarded
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigError,
    RendezvousRefused,
    TorchElasticError,
)


def run_job(config: LaunchConfig, entry: Entry, *, outcome: Path | None = None) -> int:
    """Run this node's part of a job to its end; `outcome` is where to write how it ended."""
    signals = [signal.Signals[name] for name in config.signals_to_handle]
    return guarded(lambda: _run_agent(config, entry, outcome), also=signals)


def _run_agent(config: LaunchConfig, entry: Entry, outcome: Path | None) -> int:
    # Imported after the fork: the guard stays small.
    import asyncio

    from torchelastic.agent.agent import Agent, Outcome
    from torchelastic.agent.narrator import set_up_log

    set_up_log()
    try:
        ended = asyncio.run(Agent(config, entry, prints_failure=outcome is None).run())
    except TorchElasticError as error:
        ended = Outcome(_exitcode(error), str(error))
        if outcome is None:
            print(f"torchelastic run: error: {error}", file=sys.stderr)
    if outcome is not None:
        outcome.write_text(json.dumps(ended.to_json()))
    return ended.exitcode


def _exitcode(error: TorchElasticError) -> int:
    return EXIT_USAGE if isinstance(error, ConfigError | RendezvousRefused) else EXIT_FAILED
