"""A real job, a real kill, and what the commands and the page then say of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.process.jobs import HERE, dashboard, job, status, torchelastic
from tests.process.test_dashboard import Tab, picture, tab, url_of
from tests.support import poll_for
from tests.unit.events.analysis.test_trace_export import check_nesting

FLAGS = "--nnodes=1 --nproc-per-node=2 --rdzv-id=told --redirects=3 --dashboard=0"


@pytest.mark.timeout(300)
def test_a_killed_worker_is_seen_in_every_command_and_on_the_page(tmp_path):
    """Its zygote imports torch."""
    with job(tmp_path / "job", FLAGS, HERE / "resident.py", steps=100_000, slow=0.02) as made:
        node = made.start()
        with tab(url_of(node)) as opened:
            begun = poll_for(
                lambda: [line for line in made.lines(event="step") if line["step"] >= 3],
                what="steps",
                timeout=100,
            )
            opened.until(lambda seen: seen["view"]["phase"] == "running")
            os.kill(begun[0]["pid"], signal.SIGKILL)
            seen = opened.until(recovered)
            check_recovery(seen)
            assert (seen["live"], seen["whole"]) == (True, True)
            assert seen["leader"] == seen["node"] == seen["view"]["nodes"][0]["name"]
            assert {line["node"] for line in seen["log"]} == {seen["node"]}
            poll_for(
                lambda: [
                    line
                    for line in made.lines(event="step", size=2)
                    if line["generation"] > begun[-1]["generation"]
                ],
                what="steps of both after the kill",
                timeout=100,
            )
            made.order("finish", rank=0)
            check_end(opened)
        assert node.wait(100) == 0, made.said()
        check_status(status("told"))
        assert "goodput " in node.stderr
        check_events(torchelastic("events", "told").stdout)
        check_trace(tmp_path, node.directory / "logs")
        shown = torchelastic("status", "told").stdout
        assert "  recoveries\n" in shown
        assert "killed by SIGKILL" in shown
        (run_dir,) = (node.directory / "logs").iterdir()
        assert f"to see this job again: torchelastic dashboard {run_dir}" in node.stderr
        check_afterwards(run_dir)


def recovered(seen: dict) -> bool:
    return any(one["kind"] == "failure" and one["done"] for one in seen["view"]["recoveries"])


def check_recovery(seen: dict) -> None:
    (failure,) = [one for one in seen["view"]["recoveries"] if one["kind"] == "failure"]
    assert failure["failure"]["exitcode"] == -signal.SIGKILL
    assert failure["cost"] > 0
    assert any("killed by SIGKILL" in line["text"] for line in seen["log"])


def check_end(opened: Tab) -> None:
    """The last picture shows it, unless the page was too slow: nobody waits for it for long."""
    last: dict = {}
    while seen := opened.next():
        last = seen
    if last and not last["live"]:
        assert (last["view"]["phase"], last["view"]["exitcode"]) == ("ended", 0)


def check_afterwards(run_dir: Path) -> None:
    """The finished job is shown as it was."""
    with dashboard(str(run_dir)) as url:
        again = picture(url)
        assert (again["live"], again["node"]) == (False, None)
        assert (again["view"]["phase"], again["view"]["exitcode"]) == ("ended", 0)
        check_recovery(again)
        with tab(url) as opened:
            assert opened.next()["view"] == again["view"]


def check_status(told: dict) -> None:
    assert (told["phase"], told["exitcode"], told["alive"]) == ("ended", 0, False)
    failures = [one for one in told["recoveries"] if one["kind"] == "failure"]
    assert len(failures) == 1, told["recoveries"]
    (failure,) = failures
    assert failure["failure"]["exitcode"] == -signal.SIGKILL
    assert failure["done"]
    parts = ("detect", "wait", "agree", "rebuild", "transfer", "redo")
    assert all(failure[part] >= 0 for part in parts)
    assert failure["cost"] == pytest.approx(sum(failure[part] for part in parts))
    goodput = told["goodput"]
    assert goodput["disruptions"] == 1
    assert goodput["steps_known"]
    assert 0 < goodput["ratio"] < 1
    assert goodput["productive"] + sum(goodput["parts"].values()) == pytest.approx(goodput["total"])
    assert [world["generation"] for world in told["worlds"]][:2] == [0, 1]


def check_events(text: str) -> None:
    for said in (
        "world formed with 2 workers",
        "killed by SIGKILL",
        "trains from step",
        "exit code 0",
    ):
        assert said in text


def check_trace(tmp_path: Path, logs: Path) -> None:
    path = tmp_path / "trace.json"
    torchelastic("trace", str(logs), "-o", str(path))
    entries = json.loads(path.read_text())["traceEvents"]
    check_nesting(entries)
    names = {entry["name"] for entry in entries}
    assert {"generation 0", "generation 1", "failure"} <= names
    assert any(name.startswith("step") for name in names)
