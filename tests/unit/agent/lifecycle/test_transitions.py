"""An event that cannot be handled is printed with what came before it."""

import pytest

from torchelastic.agent.lifecycle import in_process, script
from torchelastic.agent.lifecycle.script import InvalidTransition, LeaseLost, ScriptState, StoreLost
from torchelastic.agent.lifecycle.transitions import KEPT, LONGEST, Transitions


def test_of_a_script():
    kept = Transitions()
    state, _ = kept.take(script.handle, ScriptState(node="n"), LeaseLost())
    state, _ = kept.take(script.handle, state, StoreLost("the host is gone"))
    with pytest.raises(InvalidTransition) as raised:
        kept.take(script.handle, state, script.WorkersUp(3))
    first, title, *lines = str(raised.value).splitlines()
    assert first.startswith("WorkersUp while ended")
    assert title == "The last 2 transitions, oldest first:"
    assert lines[0].startswith("  [waiting for a world] LeaseLost() -> Rejoin(")
    assert lines[1].startswith("  [waiting for a world] StoreLost(reason='the host is gone') -> ")


def test_of_resident_workers():
    kept = Transitions()
    state = in_process.alone("n", "host")
    with pytest.raises(InvalidTransition, match="The last 0 transitions"):
        kept.take(in_process.handle, state, "an event that nobody knows")


class Idle:
    """A state that is always in the same phase."""

    def sentence(self):
        return "idle"


def test_the_ring_is_small_however_long_and_large_the_job():
    kept = Transitions()
    for number in range(1000):
        kept.take(lambda state, event: (state, []), Idle(), f"{number} {'x' * 10_000}")
    lines = str(kept).splitlines()[1:]
    assert len(lines) == KEPT
    assert all(len(line) < LONGEST + 40 for line in lines)
    assert lines[-1].startswith("  [idle] '999 xxx")
    assert lines[-1].endswith("-> nothing")
