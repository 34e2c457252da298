"""Simulate jobs under faults, and replay one: `python -m torchelastic.testing.simulate`.

    --seed 17               the job of seed 17, and what happened to it
    --count 10000           the jobs of 10,000 seeds, from --seed on; ends with the first that fails
    --all                   goes on after a failure, and counts them
    --stack                 the whole control plane, not its deciders alone: slower, and no model

A failure is shown with its seed and a short schedule that fails as well. What a seed makes depends
on nothing but this package: it can be replayed anywhere, with the same commit.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence

from torchelastic.testing import laws
from torchelastic.testing.bus.bus_simulation import Simulation
from torchelastic.testing.fault_schedule import Schedule, made_from, shrunk
from torchelastic.testing.laws import Violation
from torchelastic.testing.stack.stack_simulation import Stack

#: What a job is simulated by.
Level = type[Simulation] | type[Stack]

#: Not part of a story: they are most of it.
_DULL = (laws.Stepped, laws.Disturbed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchelastic.testing.simulate",
        description="Simulate the control plane of a job under faults, and check its laws.",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default 1)")
    parser.add_argument("--faults", type=int, default=10, help="faults in each (default 10)")
    parser.add_argument("--machines", type=int, help="2 to 5 of them (default: by the seed)")
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    parser.add_argument("--stack", action="store_true", help="simulate the whole stack")
    options = parser.parse_args(argv)
    level: Level = Stack if options.stack else Simulation
    began, failed = time.process_time(), []
    seeds = range(options.seed, options.seed + options.count)
    for seed in seeds:
        schedule = made_from(seed, options.faults, options.machines)
        if options.count == 1:
            print(told(schedule, level))
        if level(schedule).run():
            failed.append(seed)
            print(explained(schedule, level), flush=True)
            if not options.all:
                break
    rate = len(seeds) / (time.process_time() - began)
    if failed:
        print(f"{len(failed)} of the seeds fail: {' '.join(map(str, failed[:20]))}")
    else:
        schedules = "schedule" if len(seeds) == 1 else "schedules"
        print(f"{len(seeds):,} {schedules}, {rate:.0f} per CPU second: no law was broken")
    return 1 if failed else 0


def explained(schedule: Schedule, level: Level = Simulation) -> str:
    """The violation of a schedule, and a short schedule that breaks the same law."""

    def broken(tried: Schedule) -> list[Violation]:
        return level(tried).run()[:1]

    (found,) = broken(schedule)
    short = shrunk(schedule, lambda other: [one.law for one in broken(other)] == [found.law])
    replay = f"replay: --seed {schedule.seed}{' --stack' if level is Stack else ''}"
    lines = ["", str(found), replay, "a short schedule:", str(short)]
    return "\n".join([*lines, *(f"  -> {one}" for one in broken(short))])


def told(schedule: Schedule, level: Level = Simulation) -> str:
    """The events, one line each."""
    simulation = level(schedule)
    lines = [str(schedule), ""]
    note = simulation.laws.note

    def tell(event: laws.Event) -> None:
        note(event)
        if not isinstance(event, _DULL):
            said = ", ".join(f"{name} {_short(value)}" for name, value in _fields(event))
            lines.append(f"{event.at:7.3f} s  {type(event).__name__.lower():8} {said}")

    simulation.laws.note = tell  # type: ignore[method-assign]
    simulation.run()
    return "\n".join(lines)


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
    gc.set_threshold(20_000)  # jobs leave much behind, and all at once
    sys.exit(main())
