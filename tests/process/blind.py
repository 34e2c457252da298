"""`torchelastic` with a mistake in everything that only watches: `python blind.py run …`."""

import sys

from torchelastic import cli
from torchelastic.agent import (
    inquiry,
    metrics_endpoint,
    narrator,
    page,
    sampling,
    script_vigil,
    straggler_watch,
    telling,
    timers,
    waiting_line,
    workers,
)
from torchelastic.worker import slate

#: Whose methods fail.
OBSERVERS = (
    (inquiry.Inquiry, "open"),
    (metrics_endpoint.MetricsEndpoint, "open"),
    (narrator.Narrator, "_world_runs"),
    (narrator.Narrator, "_waits"),
    (page.Page, "start"),
    (page.Page, "close"),
    (sampling.Sampling, "look"),
    (sampling.Sampling, "turn_to"),
    (sampling.Sampling, "run"),
    (script_vigil.ScriptVigil, "run"),
    (slate, "read"),
    (slate, "read_progress"),
    (straggler_watch.StragglerWatch, "sum_up"),
    (telling.Telling, "turn_to"),
    (timers.Timers, "watch"),
    (timers.Timers, "ended"),
    (waiting_line.WaitingLine, "run"),
    (workers.Workers, "_last_lines"),
)


def fail(*_: object, **__: object) -> None:
    raise ValueError("blind")


if __name__ == "__main__":
    for owner, name in OBSERVERS:
        getattr(owner, name)
        setattr(owner, name, fail)
    sys.exit(cli.main())
