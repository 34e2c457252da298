"""`torchelastic trace`: export a job as a trace for Perfetto or chrome://tracing."""

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
Export a job as a trace: one track per rank, with generations, steps and recoveries. Open the file
at ui.perfetto.dev or chrome://tracing.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `trace` command; return the exit code."""
    parser = argparse.ArgumentParser(prog="torchelastic trace", description=_DESCRIPTION)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="LOG_DIR_OR_JOB",
        help="the --log-dir of a run, or a job id (default: the running job, or else the last one)",
    )
    parser.add_argument(
        "--job", dest="id", metavar="ID", help="which job, if the directory has several"
    )
    parser.add_argument(
        "-o",
        "--output",
        default="trace.json",
        type=Path,
        metavar="FILE",
        help="file to write (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    # Imported here: the events are slow to import, and `--help` must be fast.
    from torchelastic.events.analysis.find_job import choose
    from torchelastic.events.analysis.trace_export import trace

    try:
        records = choose(args.job, args.id).records()
        count = write(args.output, trace(records))
    except TorchElasticError as error:
        return terminal.refuse("trace", error)
    except OSError as error:
        print(f"torchelastic trace: cannot write {args.output}: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"Wrote {count} entries to {args.output}. Open it at ui.perfetto.dev.")
    return EXIT_OK


def write(path: Path, entries: Iterable[dict[str, Any]]) -> int:
    """Write one entry per line; return how many."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for count, entry in enumerate(entries, 1):
            file.write("\n" if count == 1 else ",\n")
            file.write(json.dumps(entry))
        file.write("\n]}\n")
    return count
