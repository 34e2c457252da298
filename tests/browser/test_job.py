"""A real job, a real kill, and the page that shows it as it happens."""

from __future__ import annotations

import os
import signal

import pytest

from tests.browser.conftest import address
from tests.process.jobs import HERE, dashboard, job
from tests.support import poll_for


@pytest.mark.timeout(300)
def test_a_kill_and_its_recovery_are_shown_live(tab, tmp_path):
    """Its zygote imports torch."""
    flags = "--nnodes=1 --nproc-per-node=2 --dashboard=0 --redirects=3"
    script = HERE / "resident.py"
    with job(tmp_path / "job", flags, script, steps=1_000_000, slow=0.02) as made:
        node = made.start()
        tab.go(poll_for(lambda: address(node.stderr), what="the page's address", timeout=100))
        tab.wait_for(".answers", "Training")
        tab.wait_for("#failure", "No failure so far.")
        begun = poll_for(lambda: made.lines(event="step"), what="steps", timeout=100)
        victim = begun[-1]
        os.kill(victim["pid"], signal.SIGKILL)
        tab.wait_for("table.recoveries", "Failure in generation 0")
        tab.wait_for("#failure .sentence", "killed by SIGKILL")
        tab.wait_for(".answers", f"Rank {victim['rank']} on")
        tab.wait_for(".answers", "Training")
        tab.page.wait_for_selector("table.recoveries .cost:has-text('s')")
        assert tab.page.locator("#drawing .failure .head").count() == 1
        tab.may_lose_server = True
        node.process.send_signal(signal.SIGTERM)
        node.wait(100)
        # It shows how the job ended, if that can be sent within a moment, and is gone.
        tab.page.wait_for_function(
            "() => !document.querySelector('#connection').innerText.includes('Live')"
        )


@pytest.mark.timeout(300)
def test_a_job_that_failed_can_be_looked_at_later(tab, tmp_path):
    with job(
        tmp_path / "job", "--nnodes=1 --nproc-per-node=2 --max-restarts=0 --no-zygote"
    ) as made:
        node = made.start()
        made.world(0, 2)
        made.order("raise <script>alert(1)</script>", rank=1, generation=0)
        assert node.wait(100) != 0
        with dashboard(str(node.directory / "logs")) as url:
            tab.go(url)
            assert "Failed" in tab.text(".answers")
            assert "Rank 1 on" in tab.text(".answers")
            failure = tab.text("#failure")
            assert "The failure that ended the job" in failure
            assert "ValueError: <script>alert(1)</script>" in failure
            assert "Traceback (most recent call last)" in failure
            tab.leave()  # before the server goes
