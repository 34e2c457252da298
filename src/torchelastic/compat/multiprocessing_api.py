"""`multiprocessing` of 0.2: torch's processes, with 0.2's arguments and directory of logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic import multiprocessing as of_torch
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    MultiprocessContext,
    PContext,
    ProcessFailure,
    RunProcsResult,
    SubprocessContext,
)

from torchelastic.config import Std, std_for
from torchelastic.worker import channel, handed_secret

__all__ = [
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]

Streams = Std | Mapping[int, Std]
#: In a worker, only the worker itself may use its channel to the agent and the job's secret.
_NOT_FOR_CHILDREN = (channel.VARIABLE, handed_secret.VARIABLE, "TORCHELASTIC_SECRET")


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, tuple[Any, ...]],
    envs: Mapping[int, Mapping[str, str]],
    log_dir: str,
    start_method: str = "spawn",
    redirects: Streams = Std.NONE,
    tee: Streams = Std.NONE,
) -> PContext:
    """Start a function or a program once for every local rank in `args`; returns torch's context.

    `envs` are added to this process's environment. In the empty directory `log_dir` every process
    gets `<local rank>/`, with `stdout.log` and `stderr.log` for streams that are redirected or
    tee'd (shown as well, each line after `[<name><local rank>]:`) and `error.json` if it fails.
    """
    if os.listdir(log_dir):
        raise RuntimeError(
            f"log_dir {log_dir} is not empty: use an empty directory for each group."
        )
    none = dict.fromkeys(_NOT_FOR_CHILDREN, "")
    return of_torch.start_processes(
        name,
        entrypoint,
        dict(args),
        {rank: {**none, **variables} for rank, variables in envs.items()},
        _Logs(log_dir, redirects, tee),
        start_method=start_method,
    )


class _Logs(LogsSpecs):
    """`<log_dir>/<local rank>/`, without a directory for each attempt."""

    def __init__(self, log_dir: str, redirects: Streams, tee: Streams) -> None:
        self._directory, self._kept, self._shown = log_dir, redirects, tee

    @property
    def root_log_dir(self) -> str:
        return self._directory

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the directories; torch tails the files of what is shown."""
        files = LogsDest()
        for rank, variables in envs.items():
            directory = Path(self._directory, str(rank))
            directory.mkdir()
            variables["TORCHELASTIC_ERROR_FILE"] = str(directory / "error.json")
            files.error_files[rank] = variables["TORCHELASTIC_ERROR_FILE"]
            shown = std_for(self._shown, rank)
            for stream, file, kept, tailed in (
                (Std.OUT, "stdout.log", files.stdouts, files.tee_stdouts),
                (Std.ERR, "stderr.log", files.stderrs, files.tee_stderrs),
            ):
                to_file = stream in shown | std_for(self._kept, rank)
                kept[rank] = str(directory / file) if to_file else ""
                if stream in shown:
                    tailed[rank] = kept[rank]
        return files


def to_map(val_or_map: Streams, local_world_size: int) -> dict[int, Std]:
    """The streams of every local rank.

    >>> to_map({1: Std.OUT}, 2)
    {0: <Std.NONE: 0>, 1: <Std.OUT: 1>}
    """
    return {rank: std_for(val_or_map, rank) for rank in range(local_world_size)}
