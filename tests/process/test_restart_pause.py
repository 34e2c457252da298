"""Worlds that cannot be built are tried again, but not as fast as the machine can."""

from __future__ import annotations

from tests.process.test_train import start, training

FAILING = 5


def test_worlds_that_fail_as_they_are_built_are_tried_again_after_pauses(tmp_path, monkeypatch):
    faults = ";".join(
        f"raise@rank=1,place=group.build,generation={number}" for number in range(FAILING)
    )
    flags = "--nnodes=1 --nproc-per-node=2"
    with training(tmp_path, flags, monkeypatch, faults, steps=3) as made:
        node = start(made)
        assert node.wait(60) == 0, made.said()
        assert len(node.events("world-formed")) == FAILING + 1
        reasons = [event["reason"] for event in node.events("generation-over")]
        paused = [reason for reason in reasons if "failed as soon as they began" in reason]
        # The first world lives longer: its workers start in it.
        assert len(paused) >= FAILING - 3, made.said()
        assert "A fault was planned" in paused[0]
        assert paused[0].endswith("the next one begins in 0.25 s")
        assert len({line["pid"] for line in made.lines(event="step")}) == 2, "they were replaced"
