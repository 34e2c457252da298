"""From a config to an exit code: the guard, the agent, its log."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from torchelastic import env
from torchelastic.agent.guard import guarded
from torchelastic.config import Entry, LaunchConfig


def run_job(config: LaunchConfig, entry: Entry, *, outcome: Path | None = None) -> int:
    """Run this node's part of a job to its end; `outcome` is where to write how it ended."""
    return guarded(lambda: _run_agent(config, entry, outcome))


def _run_agent(config: LaunchConfig, entry: Entry, outcome: Path | None) -> int:
    from torchelastic.agent.agent import Agent

    set_up_log("torchelastic")
    ended = asyncio.run(Agent(config, entry).run())
    if outcome is not None:
        outcome.write_text(json.dumps(ended.to_json()))
    return ended.exitcode


def set_up_log(name: str) -> None:
    """The agent's own words go to stderr, marked with the node's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[{name}] %(message)s"))
    logger = logging.getLogger("torchelastic")
    logger.handlers[:] = [handler]
    logger.setLevel(env.get("LOGLEVEL", "INFO").upper())
    logger.propagate = False
