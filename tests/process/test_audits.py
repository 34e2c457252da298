"""Audits of fixed batches: a worker that computes other gradients is named and replaced."""

from __future__ import annotations

import pytest

from tests.process.jobs import job
from tests.process.test_fixed_batches import PATIENCE, SCRIPT, digests
from tests.support import poll_for

KEYS = {"steps": 10, "bucket": 3000}

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("workers", "mode", "wrong"),
    [
        (3, "train", "0:3:on"),
        pytest.param(3, "train", "1:4:once", marks=pytest.mark.slow),
        pytest.param(3, "keep", "2:4:on", marks=pytest.mark.slow),
        pytest.param(2, "train", "1:4:once", marks=pytest.mark.slow),
    ],
)
def test_wrong_gradient_is_undone_and_its_worker_replaced(tmp_path, workers, mode, wrong):
    """Starts two jobs: about 10 s."""
    alone, _ = digests(tmp_path / "alone", 1, **KEYS)
    keys = {**KEYS, "mode": mode, "audit": 1.0, "wrong": wrong}
    found, made = digests(tmp_path / "wrong", workers, **keys)
    assert found == alone, made.said()
    failures = [event["failure"] for event in made.nodes[0].events("worker-failed")]
    (named,) = [one for one in failures if one["message"].startswith("OtherBitsError: ")]
    (told,) = made.lines(event="wrong")
    assert (named["pid"], named["rank"]) == (told["pid"], told["rank"]), named
    assert f"rank {told['rank']} computes other gradients" in named["message"]


@pytest.mark.parametrize("bits", ["refuse", pytest.param("warn", marks=pytest.mark.slow)])
def test_joining_node_with_other_bits_is_held_out_at_once_or_admitted_with_a_warning(
    tmp_path, bits
):
    """Its gradients differ from the beginning. Two nodes import torch: about 10 s."""
    keys = {"steps": 10**6, "wait": 0.01, "bucket": 3000, "bits": bits}
    flags = "--nnodes=1:2 --nproc-per-node=1 --settle=0.1 --max-restarts=0"
    with job(tmp_path / "job", flags, SCRIPT, ledger=tmp_path / "ledger", **keys) as made:
        first = made.start()
        poll_for(lambda: made.lines(event="ran", step=2), what="the first node trains")
        second = made.start(wrong="1:0:on")
        told = poll_for(lambda: made.lines(event="wrong"), what="it is wrong", timeout=PATIENCE)
        ran = {"event": "ran", "step": told[0]["step"] + 5}
        poll_for(lambda: made.lines(**ran), what="the training goes on", timeout=PATIENCE)
        (made.orders / "part").write_text(str(ran["step"] + 40))
        (made.orders / "part").rename(made.orders / "last")
        assert first.wait(PATIENCE) == 0, made.said()
        assert second.wait(PATIENCE) == 0, made.said()
    failed = [event["failure"]["message"] for event in second.events("worker-failed")]
    formed = first.events("world-formed")[-1]
    if bits == "warn":
        assert (failed, formed["size"]) == ([], 2)
        assert "Workers differ, and train on" in first.stderr + second.stderr
        return
    assert failed[0].startswith("OtherBitsError: rank 1 computes other gradients"), made.said()
    assert f"of step {told[0]['step']} than" in failed[0], "its first step"
    assert (formed["size"], formed["restarts_used"]) == (1, 0)
    (held,) = formed["held"].values()
    assert held.startswith("held out for 1 h: rank 1 computes other gradients"), held
