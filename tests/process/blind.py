"""`torchelastic` with a mistake in everything that only watches: `python blind.py run …`."""

import sys

from torchelastic import cli
from torchelastic.agent.output import console
from torchelastic.agent.telemetry import (
    dashboard_process,
    http_endpoints,
    progress_sampler,
    reporter,
    shipper,
    straggler_watch,
)
from torchelastic.agent.watch import hang_watchdog, inspector, worker_timers
from torchelastic.agent.workers import pool
from torchelastic.worker import status_page

#: Whose methods fail.
OBSERVERS = (
    (inspector.QuerySocket, "open"),
    (http_endpoints.MetricsServer, "open"),
    (reporter.Reporter, "_world_runs"),
    (reporter.Reporter, "_waits"),
    (dashboard_process.DashboardProcess, "start"),
    (dashboard_process.DashboardProcess, "close"),
    (progress_sampler.ProgressSampler, "look"),
    (progress_sampler.ProgressSampler, "turn_to"),
    (progress_sampler.ProgressSampler, "run"),
    (hang_watchdog.HangWatchdog, "run"),
    (status_page, "read"),
    (status_page, "read_progress"),
    (straggler_watch.StragglerWatch, "sum_up"),
    (shipper.LogShipper, "turn_to"),
    (worker_timers.Timers, "watch"),
    (worker_timers.Timers, "ended"),
    (console.WaitingLine, "run"),
    (pool.WorkerPool, "_last_lines"),
)


def fail(*_: object, **__: object) -> None:
    raise ValueError("blind")


if __name__ == "__main__":
    for owner, name in OBSERVERS:
        getattr(owner, name)
        setattr(owner, name, fail)
    sys.exit(cli.main())
