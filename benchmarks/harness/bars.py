"""What `in_process.py` is to reach, as pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.steady import Calls, Cost
from benchmarks.harness.summary import Summary, summarize

KILL_SECONDS = 0.100
LARGE_KILL_SECONDS = 0.150
STOP_MARGIN = 0.150
SILENCE_MARGIN = 0.300
JOIN_STEPS = 3
JOIN_COPIES = 1.5
JOIN_FACTOR = 30
EXTRA_CALLS = 2
EXTRA_CPU = 50e-6
EXTRA_CPU_SHARE = 0.005


@dataclass(frozen=True)
class Bar:
    """What was wanted, in words, and whether it was met; None if that cannot be said."""

    wanted: str
    met: bool | None


def ratio(ours: Summary, theirs: Summary) -> float | None:
    """How many times faster ours is."""
    if not ours.times or not theirs.times:
        return None
    return theirs.median / max(ours.median, 1e-3)  # recovered within the step that was due: 1 ms


def faster(ours: Summary, theirs: Summary, factor: int) -> Bar:
    """A peer that never recovered is beaten by any recovery, but that is no number."""
    times = ratio(ours, theirs)
    met = None if times is None else times >= factor and not ours.failed
    return Bar(f"at least {factor} times faster", met)


def median_below(summary: Summary, limit: float) -> Bar:
    met = summary.median < limit and not summary.failed if summary.times else None
    return Bar(f"median under {limit * 1000:.0f} ms", met)


def worst_below(summary: Summary, basis: float, margin: float, name: str) -> Bar:
    """All of them within a time-out and a margin."""
    wanted = f"worst within {name} + {margin * 1000:.0f} ms"
    if not summary.count:
        return Bar(wanted, None)
    return Bar(wanted, not summary.failed and max(summary.times) <= basis + margin)


def beyond_copy(repetitions: Sequence[Repetition], copy: float) -> Summary:
    """What recoveries took beyond `copy` seconds for each newcomer's state that had to move."""
    return summarize(
        [
            None if each.seconds is None else each.seconds - each.details["newcomers"] * copy
            for each in repetitions
        ]
    )


def beyond_join(repetitions: Sequence[Repetition], copy: float) -> Summary:
    """What survivors stood still beyond what a join may cost them; negative is within it."""
    return summarize(
        [
            None
            if each.seconds is None
            else each.seconds - JOIN_STEPS * each.details["step"] - JOIN_COPIES * copy
            for each in repetitions
        ]
    )


def notice(repetitions: Sequence[Repetition]) -> Bar:
    """Every notice costs a few steps of standstill at most, and no step is redone."""
    wanted = f"each within {JOIN_STEPS} steps, none redone"
    if not repetitions:
        return Bar(wanted, None)
    fine = [
        each.seconds is not None
        and each.details["redone"] == 0
        and each.seconds <= JOIN_STEPS * each.details["step"]
        for each in repetitions
    ]
    return Bar(f"{wanted}: {sum(fine)} of {len(fine)}", all(fine))


def join(repetitions: Sequence[Repetition], copy: float) -> Bar:
    wanted = f"median within {JOIN_STEPS} steps + {JOIN_COPIES:g} x {copy * 1000:.0f} ms of copying"
    beyond = beyond_join(repetitions, copy)
    return Bar(wanted, beyond.median <= 0 and not beyond.failed if beyond.times else None)


def large_kill(repetitions: Sequence[Repetition], copy: float) -> Bar:
    wanted = (
        f"median under {LARGE_KILL_SECONDS * 1000:.0f} ms + {copy * 1000:.0f} ms of copying for "
        "each newcomer in the first world"
    )
    return Bar(wanted, median_below(beyond_copy(repetitions, copy), LARGE_KILL_SECONDS).met)


def extra_cpu(pairs: Sequence[tuple[Cost, Cost]]) -> Summary:
    """Processor time of the training thread per step beyond the second of each pair."""
    return Summary(tuple(first.cpu - second.cpu for first, second in pairs))


def cpu_time(pairs: Sequence[tuple[Cost, Cost]]) -> Bar:
    wanted = f"at most {EXTRA_CPU * 1e6:.0f} us of thread CPU time more"
    return Bar(wanted, extra_cpu(pairs).median <= EXTRA_CPU if pairs else None)


def cpu_share(pairs: Sequence[tuple[Cost, Cost]]) -> Bar:
    wanted = f"at most {EXTRA_CPU_SHARE:.1%} of the step more thread CPU time"
    if not pairs:
        return Bar(wanted, None)
    step = Summary(tuple(second.wall for _, second in pairs)).median
    return Bar(wanted, extra_cpu(pairs).median <= EXTRA_CPU_SHARE * step)


def collectives(pairs: Sequence[tuple[Cost, Cost]]) -> Bar:
    met = all(first.collectives <= second.collectives for first, second in pairs)
    return Bar("no collective more", met if pairs else None)


def calls(ours: Calls | None, bare: Calls | None) -> Bar:
    wanted = f"at most {EXTRA_CALLS} system calls more, none that blocks"
    if ours is None or bare is None:
        return Bar(wanted, None)
    few = sum(ours.kinds.values()) - sum(bare.kinds.values()) <= EXTRA_CALLS
    return Bar(wanted, few and ours.blocking() <= bare.blocking() + 0.05)
