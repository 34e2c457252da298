"""Simulate jobs under faults, and replay one: `python -m tests.simulation.simulate`.

    --seed 17               the job of seed 17, and what happened to it
    --count 1000            the jobs of 1,000 seeds, from --seed on; ends with the first that fails
    --all                   continues after a failure, and counts them
    --replicas              a sharded model, whose worlds have whole replicas
    --etcd                  the rendezvous is at etcd, which is never cut from the nodes

A failure is shown with its seed and a short schedule that fails as well. A seed can be replayed
anywhere with the same commit: the run depends only on this package.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Sequence

from tests.simulation.fault_schedule import (
    Schedule,
    made_from,
    peers_from,
    sharded_from,
    shrunk,
)
from tests.simulation.job_simulation import JobSimulation
from torchelastic.chaos import laws
from torchelastic.chaos.laws import Violation

#: Events that are too frequent to print.
_FREQUENT = (laws.StepFinished, laws.JobDisturbed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.simulate",
        description="Simulate the control plane of a job under faults, and check its laws.",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default 1)")
    parser.add_argument("--faults", type=int, default=10, help="faults in each (default 10)")
    parser.add_argument("--machines", type=int, help="2 to 5 of them (default: by the seed)")
    parser.add_argument("--all", action="store_true", help="continue after a failure")
    parser.add_argument("--replicas", action="store_true", help="train a sharded model")
    parser.add_argument("--etcd", action="store_true", help="with the rendezvous at etcd")
    options = parser.parse_args(argv)
    make = peers_from if options.etcd else sharded_from if options.replicas else made_from
    began, failed = time.process_time(), []
    seeds = range(options.seed, options.seed + options.count)
    for seed in seeds:
        schedule = make(seed, options.faults, options.machines)
        if options.count == 1:
            print(told(schedule))
        if JobSimulation(schedule).run():
            failed.append(seed)
            print(explained(schedule), flush=True)
            if not options.all:
                break
    rate = len(seeds) / (time.process_time() - began)
    if failed:
        print(f"{len(failed)} of the seeds fail: {' '.join(map(str, failed[:20]))}")
    else:
        schedules = "schedule" if len(seeds) == 1 else "schedules"
        print(f"{len(seeds):,} {schedules}, {rate:.0f} per CPU second: no law was broken")
    return 1 if failed else 0


def explained(schedule: Schedule) -> str:
    """The violation of a schedule, and a short schedule that breaks the same law."""

    def broken(tried: Schedule) -> list[Violation]:
        return JobSimulation(tried).run()[:1]

    (found,) = broken(schedule)
    short = shrunk(schedule, lambda other: [one.law for one in broken(other)] == [found.law])
    replay = f"replay: --seed {schedule.seed}{' --replicas' if schedule.replica else ''}"
    replay += " --etcd" if schedule.etcd else ""
    lines = ["", str(found), replay, "a short schedule:", str(short)]
    return "\n".join([*lines, *(f"  -> {one}" for one in broken(short))])


def told(schedule: Schedule) -> str:
    """The events, one line each."""
    simulation = JobSimulation(schedule)
    lines = [str(schedule), ""]
    note = simulation.laws.note

    def tell(event: laws.Event) -> None:
        note(event)
        if not isinstance(event, _FREQUENT):
            said = ", ".join(f"{name} {_short(value)}" for name, value in _fields(event))
            lines.append(f"{event.at:7.3f} s  {_kind(event):15} {said}")

    simulation.laws.note = tell  # type: ignore[method-assign]
    simulation.run()
    return "\n".join(lines)


def _kind(event: laws.Event) -> str:
    """`node up` for a `NodeUp`."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(event).__name__).lower()


def _fields(event: laws.Event) -> list[tuple[str, object]]:
    shown = {
        name: value
        for name, value in zip(event._fields, event, strict=True)
        if value not in ("", None)
    }
    return [(name, shown[name]) for name in shown if name not in ("at", "electorates", "present")]


def _short(value: object) -> str:
    return " ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


if __name__ == "__main__":
    gc.set_threshold(20_000)  # each job leaves many objects behind at once
    sys.exit(main())
