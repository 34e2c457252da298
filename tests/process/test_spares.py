"""A node that waits outside the world holds no memory for what nobody will go back to."""

from __future__ import annotations

import os
import signal

import pytest

from tests.process.jobs import HERE, job
from tests.support import poll_for

FIRST, SECOND, STEPS = 4, 6, 8
PATIENCE = 90.0

#: Several workers import torch at the same time, on however few cores.
pytestmark = pytest.mark.timeout(300)


def memories(pid: int) -> int:
    """How many a process holds open."""
    found = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += "torchelastic-snapshot" in os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:  # closed since it was listed
            continue
    return found


@pytest.mark.slow
def test_a_spare_gives_back_what_it_held_when_it_was_in_the_world(tmp_path):
    """Three nodes train, one is killed, and two are a size that nobody wants: one waits."""
    flags = "--nnodes=1:3 --world-sizes=1,3 --nproc-per-node=1 --max-restarts=10"
    keys = {"steps": STEPS, "hold": f"{FIRST},{SECOND}"}
    with job(tmp_path / "job", flags, HERE / "kept.py", **keys) as one:
        for _ in range(3):
            one.start()

        def holding(step: int, size: int, generation: int = 0) -> list[dict[str, int]]:
            """Wait until all ranks of a world of this size wait before a step."""
            said = lambda: [  # noqa: E731
                line
                for line in one.lines(event="holding", step=step, world_size=size)
                if line["generation"] >= generation
            ]
            what = f"{size} ranks that wait at step {step}"
            return one.wait_for(lambda: len(said()) >= size and said(), what, PATIENCE)

        three = holding(FIRST, size=3)[-1]["generation"]
        first, spare, third = one.nodes
        poll_for(lambda: memories(spare.agent_pid), what="it holds its pieces", timeout=PATIENCE)
        third.kill()
        alone = holding(FIRST, size=1, generation=three + 1)[-1]["generation"]
        one.give(f"go-{FIRST}")
        holding(SECOND, size=1)
        # What that world began from the spare still has. The next one begins from a later step.
        (worker,) = one.lines(event="start", generation=alone)
        os.kill(worker["pid"], signal.SIGKILL)
        holding(SECOND, size=1, generation=alone + 1)
        poll_for(
            lambda: not memories(spare.agent_pid), what="the spare holds nothing", timeout=PATIENCE
        )
        one.give(f"go-{SECOND}")
        assert first.wait(PATIENCE) == 0, one.said()
    assert [end["step"] for end in one.lines(event="end")] == [STEPS]
