"""`elastic_launch`: a job from Python, as torch's launcher has it.

The agent runs in a process of its own, exactly as under `torchelastic run`: it adopts and reaps
every orphan of the job, which the caller's process must not have to put up with.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import (
    EXIT_FAILED,
    EXIT_NOT_ENOUGH_NODES,
    EXIT_OK,
    EXIT_RENDEZVOUS_LOST,
    EXIT_SIGNAL_BASE,
    JobInterrupted,
    NotEnoughNodes,
    RendezvousLost,
    TorchElasticError,
)
from torchelastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torchelastic.rendezvous.world import World


class elastic_launch:  # noqa: N801  (torch's name)
    """Run a function or a program on every worker of an elastic job.

    `elastic_launch(config, function)(*args)` returns what the function returned, by global rank,
    for the workers of this node. `function` and `args` must be picklable, as with spawn.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]
) -> dict[int, Any]:
    """Run this node's part of a job in an agent process; results by global rank."""
    if not config.run_id:
        config = dataclasses.replace(config, run_id=uuid.uuid4().hex[:12])
    with tempfile.TemporaryDirectory(prefix="torchelastic_launch_") as name:
        directory = Path(name)
        entry = _entry(entrypoint, args, directory)
        exitcode, outcome = _run_agent(config, entry, directory)
        if exitcode != EXIT_OK:
            raise _error(exitcode, outcome, entry)
        return {
            int(rank): pickle.loads(Path(path).read_bytes())
            for rank, path in outcome["results"].items()
        }


def _entry(entrypoint: Callable[..., Any] | str, args: list[Any], directory: Path) -> Entry:
    if isinstance(entrypoint, str):
        return Entry("program", entrypoint, tuple(map(str, args)))
    name = getattr(entrypoint, "__qualname__", repr(entrypoint))
    path = directory / "call.pickle"
    preparation = multiprocessing.spawn.get_preparation_data(name)
    path.write_bytes(pickle.dumps((preparation, entrypoint, tuple(args))))
    return Entry("function", str(path))


def _run_agent(
    config: LaunchConfig, entry: Entry, directory: Path
) -> tuple[int, dict[str, Any]]:
    request, outcome = directory / "request.json", directory / "outcome.json"
    asked = {"parent": os.getpid(), "config": config.to_json(), "entry": dataclasses.asdict(entry)}
    request.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "torchelastic.agent", str(request), str(outcome)]
    with subprocess.Popen(command) as agent:
        try:
            agent.wait()
        except KeyboardInterrupt:
            agent.wait()  # the terminal has told the agent, too: let it stop its workers
            raise
    ended = json.loads(outcome.read_text()) if outcome.exists() else {}
    return agent.returncode, ended


def _error(exitcode: int, outcome: dict[str, Any], entry: Entry) -> TorchElasticError:
    reason = outcome.get("reason") or f"the agent ended with exit code {exitcode}"
    if exitcode == EXIT_FAILED and outcome.get("world"):
        world = World.from_json(outcome["world"])
        failures = [item for item in (world.cause, *world.consequences) if item is not None]
        made = {item.rank: ProcessFailure.from_failure(item) for item in failures}
        return ChildFailedError(entry.name, made)
    if exitcode == EXIT_NOT_ENOUGH_NODES:
        return NotEnoughNodes(reason)
    if exitcode == EXIT_RENDEZVOUS_LOST:
        return RendezvousLost(reason)
    if exitcode >= EXIT_SIGNAL_BASE:
        return JobInterrupted(reason)
    return TorchElasticError(reason)
