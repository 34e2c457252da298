"""From a config to an exit code: the guard around the agent."""

from __future__ import annotations

import json
from pathlib import Path

from torchelastic.agent.guard import guarded
from torchelastic.config import Entry, LaunchConfig


def run_job(config: LaunchConfig, entry: Entry, *, outcome: Path | None = None) -> int:
    """Run this node's part of a job to its end; `outcome` is where to write how it ended."""
    return guarded(lambda: _run_agent(config, entry, outcome))


def _run_agent(config: LaunchConfig, entry: Entry, outcome: Path | None) -> int:
    # Imported after the fork: the guard stays small.
    import asyncio

    from torchelastic.agent.agent import Agent
    from torchelastic.agent.narrator import set_up_log

    set_up_log()
    ended = asyncio.run(Agent(config, entry).run())
    if outcome is not None:
        outcome.write_text(json.dumps(ended.to_json()))
    return ended.exitcode
