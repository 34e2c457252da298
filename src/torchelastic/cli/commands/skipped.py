"""`torchelastic skipped`: print the samples that a job has skipped."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from torchelastic.cli import terminal
from torchelastic.cli.parser import Parsed
from torchelastic.errors import EXIT_OK
from torchelastic.events.analysis.bad_steps import skipped_samples
from torchelastic.events.analysis.find_job import choose


def main(parsed: Parsed) -> int:
    """Print a line of JSON for each sample, in the order of steps and ranks."""
    skipped = skipped_samples(choose(parsed.argument, parsed["job"]).records())
    if skipped.missing:
        sys.stderr.write(
            f"torchelastic: {skipped.missing} more samples are in no event log on this machine: "
            "run this where the leader of the job ran.\n"
        )
    try:
        for one in skipped.samples:
            sys.stdout.write(f"{json.dumps(asdict(one))}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.discard_output()
    return EXIT_OK
