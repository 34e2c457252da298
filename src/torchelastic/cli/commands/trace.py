"""`torchelastic trace`: a job as a file that Perfetto and Chrome's tracing page open."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_FAILED, EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Write a job's story as a trace: one track per rank, the generations, steps and recoveries.
Open it at ui.perfetto.dev, or at chrome://tracing.
"""


def main(argv: Sequence[str]) -> int:
    """The `trace` command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchelastic trace", description=_DESCRIPTION)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="LOG_DIR_OR_JOB",
        help="the --log-dir of a run, or a job id (default: the job that runs, or the last one)",
    )
    parser.add_argument("--job", dest="id", metavar="ID", help="which job of a directory is meant")
    parser.add_argument("-o", "--output", default="trace.json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    from torchelastic.events.analysis.find_job import (
        choose,  # the events are slow to import: not for --help
    )
    from torchelastic.events.analysis.trace_export import trace

    try:
        records = choose(args.job, args.id).records()
        count = write(args.output, trace(records))
    except TorchElasticError as error:
        return terminal.refuse("trace", error)
    except OSError as error:
        print(f"torchelastic trace: {args.output} cannot be written: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{count} entries written to {args.output}: open it at ui.perfetto.dev")
    return EXIT_OK


def write(path: Path, entries: Iterable[dict[str, Any]]) -> int:
    """One entry a line; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for count, entry in enumerate(entries, 1):
            file.write("\n" if count == 1 else ",\n")
            file.write(json.dumps(entry))
        file.write("\n]}\n")
    return count
