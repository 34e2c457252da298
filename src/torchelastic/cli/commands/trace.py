"""`torchelastic trace`: export a job as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchelastic.cli.parser import Parsed
from torchelastic.errors import EXIT_FAILED, EXIT_OK
from torchelastic.events.analysis.find_job import choose
from torchelastic.events.analysis.trace_export import trace


def main(parsed: Parsed) -> int:
    """Run the `trace` command; return the exit code."""
    output = Path(parsed["output"])
    records = choose(parsed.argument, parsed["job"]).records()
    try:
        count = write(output, trace(records))
    except OSError as error:
        print(f"{parsed.prog}: cannot write {output}: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"Wrote {count} entries to {output}. Open it at ui.perfetto.dev.")
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
