"""Snapshots that agents hold: over the ends of workers and of nodes, with real agents."""

from __future__ import annotations

import signal

from tests.process.jobs import HERE, Job, job
from tests.support import poll_for

SCRIPT = HERE / "holding.py"
#: Both begin together, however long the second takes to come.
FLAGS = "--nnodes=1:2 --settle=60"


def order(made: Job, number: int, what: str, *, rank: int, generation: int) -> None:
    made.order(what, rank=f"{rank}.{number:03}", generation=generation)


def commit(made: Job, step: int, *, ranks: list[int], generation: int = 0) -> None:
    for rank in ranks:
        order(made, step, f"commit {step}", rank=rank, generation=generation)
    for rank in ranks:
        seen(made, "committed", rank=rank, generation=generation, step=step)


def seen(made: Job, event: str, **wanted: object) -> dict:
    return made.wait_for(lambda: made.lines(event=event, **wanted), f"{event} {wanted}")[-1]


def holds(made: Job, rank: int, generation: int, piece: list) -> dict:
    """Wait until the node of a rank holds this; its inventory then."""
    for number in range(500, 900):
        order(made, number, "inventory", rank=rank, generation=generation)
        asked = number - 500 + 2

        def answered(asked: int = asked) -> dict | None:
            found = made.lines(event="inventory", rank=rank, generation=generation)
            return found[-1] if len(found) >= asked else None

        inventory = poll_for(answered, what="an inventory", timeout=60)
        if piece in inventory["held"]:
            return inventory
    raise AssertionError(f"{piece} is not among {inventory['held']}\n{made.said()}")


def finish(made: Job, generation: int) -> None:
    for rank in (0, 1):
        order(made, 999, "finish", rank=rank, generation=generation)
    for node in made.nodes:
        assert node.wait() in (0, -signal.SIGKILL), made.said()


def test_snapshots_outlive_workers_and_generations(tmp_path):
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2", SCRIPT) as made:
        made.start()
        assert seen(made, "inventory", rank=0, generation=0)["held"] == []
        for rank in (0, 1):
            seen(made, "ready", rank=rank, generation=0)
        for step in (1, 2, 3):
            commit(made, step, ranks=[0, 1])
        order(made, 999, "die", rank=1, generation=0)
        for rank in (0, 1):
            held = seen(made, "inventory", rank=rank, generation=1)["held"]
            assert ["shared", 0, 3, False] in held
            assert ["own:0", 0, 3, False] in held
            assert ["own:1", 0, 3, False] in held
        seen(made, "ready", rank=0, generation=1)
        order(made, 1, "fetch own:1 0 3 nowhere:1", rank=0, generation=1)  # it is here
        assert seen(made, "fetched", rank=0)["right"]
        finish(made, generation=1)


def test_a_lost_nodes_pieces_are_held_by_another_and_brought_to_its_replacement(tmp_path):
    with job(tmp_path / "job", FLAGS, SCRIPT) as made:
        made.start()
        second = made.start()
        made.world(0, 2)
        for rank in (0, 1):
            seen(made, "ready", rank=rank, generation=0)
        for step in (1, 2):
            commit(made, step, ranks=[0, 1])
        holds(made, 0, 0, ["own:1", 0, 2, True])
        second.kill()
        held = seen(made, "inventory", rank=0, generation=1)
        # Whether the agent has made it its own by now depends on who was quicker.
        assert ["own:1", 0, 2] in [version for *version, _ in held["held"]]
        made.start()
        # Some may have been brought before it was asked for.
        seen(made, "inventory", rank=1, world_size=2, generation=2)
        seen(made, "ready", rank=1, generation=2)
        order(made, 1, f"fetch own:1 0 2 {held['peer']}", rank=1, generation=2)
        assert seen(made, "fetched", rank=1, generation=2)["right"]
        order(made, 2, f"fetch shared 0 2 {held['peer']}", rank=1, generation=2)
        assert seen(made, "fetched", rank=1, generation=2, piece="shared")["right"]
        order(made, 3, f"fetch shared 0 1234 {held['peer']}", rank=1, generation=2)
        refused = poll_for(
            lambda: [line for line in made.lines(event="fetched") if "refused" in line],
            what="a refusal",
        )
        assert "does not hold that version of 'shared'" in refused[0]["refused"]
        finish(made, generation=2)
