"""Whatever a worker waits for in a world, it is free at once when the world is over."""

from __future__ import annotations

from statistics import median

import pytest

from tests import late_backend
from tests.process import abort_ranks, forked
from tests.support import SOAK
from torchelastic.training.group.group import GenerationOver, PeerLostError

#: What is meant by that: nearly always within this, on a machine that has nothing else to do.
SOON = 0.1
#: On any machine: before the time-outs of the groups, of two seconds and more, would free it.
IN_TIME = 1.5

pytestmark = pytest.mark.usefixtures("forks")


def survivors(answers):
    return [answers[rank] for rank in range(abort_ranks.SIZE) if rank != abort_ranks.LOST]


def check_freed(answers):
    for freed in survivors(answers):
        # One may be freed by the end of its connection to the other, which aborted a little before.
        assert freed.error in (GenerationOver, PeerLostError)
        assert freed.after < IN_TIME
        assert freed.quiet
        assert freed.launched_later is GenerationOver
        assert freed.next_sum == abort_ranks.SIZE - 1


@pytest.mark.parametrize("what", list(abort_ranks.OPERATIONS))
def test_free_when_a_peer_is_frozen(what):
    with forked.ranks(abort_ranks.lose_a_peer, [0, 1, 2], what, "frozen") as answers:
        check_freed(answers)


@pytest.mark.parametrize("what", ["all-reduces", "backward", "subgroup"])
def test_free_when_a_peer_is_killed(what):
    with forked.ranks(abort_ranks.lose_a_peer, [0, 1, 2], what, "killed") as answers:
        check_freed(answers)


@pytest.mark.parametrize("cause", ["frozen", "killed"])
@pytest.mark.parametrize("what", ["all-reduces", "backward", "exchange"])
def test_free_on_a_back_end_with_the_habits_of_nccl(what, cause):
    """An abort is the only way out of it, and its watchdog would end a process that is alive."""
    args = (what, cause, late_backend.NAME)
    with forked.ranks(abort_ranks.lose_a_peer, [0, 1, 2], *args) as answers:
        check_freed(answers)


def test_free_when_a_peer_never_comes_to_build():
    with forked.ranks(abort_ranks.lose_a_builder, [0, 1, 2]) as answers:
        check_freed(answers)


def check_tally(tally, size):
    assert tally.strange == []
    assert max(tally.freed_after) < IN_TIME
    # A rank may find fewer: another had aborted before all were found.
    assert max(tally.connections) == size - 1
    assert tally.after <= tally.before
    assert tally.strangers_disturbed == []


@pytest.mark.parametrize("what", ["all-reduces", "backward"])
def test_world_after_world_beside_a_busy_thread(what):
    with forked.ranks(abort_ranks.abort_in_traffic, [0, 1], what, 2, 5, True) as answers:
        for tally in answers.values():
            check_tally(tally, 2)
            assert tally.strangers > 0


@pytest.mark.alone
@pytest.mark.slow
def test_aborts_in_live_traffic(capsys):
    """A thousand of them in a soak of ten and more."""
    tallies, worlds = [], 13 * SOAK
    for what in ("all-reduces", "backward"):
        args = (what, 4, worlds, False)
        with forked.ranks(abort_ranks.abort_in_traffic, [0, 1, 2, 3], *args) as answers:
            tallies += answers.values()
        with capsys.disabled():
            print(f"\n{what}: {summary(list(answers.values()))}")
    assert sum(len(tally.freed_after) for tally in tallies) >= 100 * SOAK
    for tally in tallies:
        check_tally(tally, 4)
        assert median(tally.freed_after) < SOON
    # The last resort: such a worker is killed and replaced.
    assert sum(tally.not_quiet for tally in tallies) <= 1 + SOAK // 2


def summary(tallies):
    freed = sorted(after for tally in tallies for after in tally.freed_after)
    leaving = sorted(seconds for tally in tallies for seconds in tally.leaving)
    building = sorted(seconds for tally in tallies for seconds in tally.building)
    late = sum(after >= SOON for after in freed)
    stuck, not_quiet = (sum(getattr(t, name) for t in tallies) for name in ("stuck", "not_quiet"))
    times = ", ".join(
        f"{name} {1e3 * seconds[len(seconds) // 2]:.1f} ms, worst {1e3 * seconds[-1]:.1f}"
        for name, seconds in (("freed after", freed), ("left in", leaving), ("built in", building))
    )
    return (
        f"{len(freed)} aborts, {times}; {late} later than {1e3 * SOON:.0f} ms,"
        f" {stuck} with an operation of gloo's left to its time-out, {not_quiet} not quiet"
    )
