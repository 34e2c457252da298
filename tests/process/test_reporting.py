"""What a script reports is seen by its job: real workers, with steps and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.jobs import Node, job
from tests.support import poll_for
from torchelastic.events.analysis.view import JobView, fold
from torchelastic.events.log import read

SCRIPT = Path(__file__).with_name("reporting.py")


def view_of(node: Node) -> JobView:
    paths = list((node.directory / "logs").rglob("events.jsonl"))
    return fold(read(paths[0])) if paths else JobView()


def values(view: JobView, name: str) -> list[float]:
    return [value for _, _, value in view.metrics.get(name, ())]


def test_plain_script_reports_metrics_in_every_generation(tmp_path):
    flags = "--standalone --nproc-per-node=2 --max-restarts=1"
    with job(tmp_path, flags) as it:
        node = it.start(script=[str(SCRIPT), "script", str(it._orders)])
        poll_for(lambda: 10.0 in values(view_of(node), "loss"), what="the loss, live", timeout=100)
        (it._orders / "finish").touch()
        assert node.wait(100) == 0, node.stderr
        view = view_of(node)
        # Rank 1 may have been the only one to say something, before or after the other: of a
        # child, nothing is heard.
        assert set(values(view, "loss")) <= {0.0, 1.0, 10.0, 11.0}
        assert set(values(view, 'acc"ura\ncy')) == {0.5}
        assert {step for _, step, _ in view.metrics["loss"]} == {None}
        assert "only one has it" not in view.metrics, "it is not finite"
        told = [item for event in node.events("progress") for item in event["metrics"].items()]
        assert ("only one has it", None) in told


@pytest.mark.slow
def test_a_resident_worker_reports_with_its_steps(tmp_path):
    with job(tmp_path, "--standalone --nproc-per-node=2") as it:
        node = it.start(script=[str(SCRIPT), "train", str(tmp_path / "store")])
        assert node.wait(100) == 0, node.stderr
        view = view_of(node)
        assert values(view, "step")[-1] == 2.0
        assert view.metrics["step"][-1][1] in (2, 3), "the step it was in, or the one after"
        assert values(view, "loss"), "tensors are numbers"
        assert set(values(view, "progress_rate")) & {7.0, 8.0}
        assert view.samples == 24
        assert view.checkpoint is not None
        assert (view.checkpoint.step, view.checkpoint.size > 0) == (3, True)
