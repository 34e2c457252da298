"""The agent's end of the page: what it makes of a process that does anything."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.unit.agent.cast import in_loop
from torchelastic.agent.telemetry import dashboard_process
from torchelastic.agent.telemetry.dashboard_process import DashboardProcess
from torchelastic.config import LaunchConfig
from torchelastic.errors import ConfigError, SpawnError
from torchelastic.system import linux

URL = '{"url": "http://127.0.0.1:1/"}'


def made(**config):
    return DashboardProcess.wanted(LaunchConfig(run_id="job", dashboard="127.0.0.1:0", **config))


@pytest.fixture
def instead(monkeypatch):
    """Start another program than the page."""
    start = dashboard_process.start_program

    def use(code):
        def start_other(command, **more):
            return start([sys.executable, "-c", code], **more)

        monkeypatch.setattr(dashboard_process, "start_program", start_other)

    return use


def watched(it):
    """The messages about it until it has ended."""
    said = []

    async def run():
        pids = it.start({}, "id")
        try:
            await asyncio.wait_for(it.watch(said.append), 60)
        finally:
            await it.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    asyncio.run(run())
    return said


def test_dashboard_is_off_by_default_and_rejects_file_without_token(tmp_path):
    assert DashboardProcess.wanted(LaunchConfig()) is None
    (tmp_path / "short").write_bytes(b"short")
    for name in ("short", "none"):
        with pytest.raises(ConfigError, match="--dashboard-token-file"):
            made(dashboard_token_file=str(tmp_path / name))


NOISE = f"""
import sys
print("hello from sitecustomize\\n[1]\\n{{}}\\n" + "x" * 1_000_000, flush=True)
sys.stdout.buffer.write(b'\\xff\\x00{{\\n{URL}\\n\\xff{{')
"""


@pytest.mark.parametrize(
    ("code", "exitcode"), [(NOISE, 0), ("raise SystemExit(3)", 3)], ids=["noise", "nothing"]
)
def test_dashboard_address_goes_to_terminal_only(instead, caplog, code, exitcode):
    caplog.set_level("INFO")
    instead(code)
    assert watched(made()) == [f"the dashboard exited: exit code {exitcode}; the job continues"]
    assert ("dashboard: http://127.0.0.1:1/" in caplog.text) is (exitcode == 0)


@pytest.mark.parametrize(
    ("code", "grace"),
    [("import time; time.sleep(600)", 0.1), ("import sys; sys.stdin.read()", 600)],
)
@in_loop
async def test_dashboard_is_asked_to_end_and_then_killed(instead, monkeypatch, code, grace):
    monkeypatch.setattr(dashboard_process, "LAST_PAGE_TIMEOUT", grace)
    instead(code)
    it = made()
    (pid,) = it.start({}, "id")
    await it.close()
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_cannot_be_started_costs_nothing_else(monkeypatch, caplog):
    def refuse(*args, **more):
        raise SpawnError("no more processes.")

    monkeypatch.setattr(dashboard_process, "start_program", refuse)
    assert watched(made()) == []
    assert "Could not start the dashboard: no more processes. The job continues." in caplog.text


def test_dashboard_runs_niced_and_failed_start_is_reported(instead):
    instead(
        "import os, json; told = [os.nice(0), open('/proc/self/oom_score_adj').read().strip()]\n"
        "print(json.dumps({'error': ' '.join(map(str, told))}))"
    )
    nice = min(os.nice(0) + linux.POLITE, 19)
    assert watched(made()) == [f"no dashboard at 127.0.0.1:0: {nice} 1000; the job continues"]


@pytest.mark.parametrize(
    ("log_dir", "command"),
    [
        ("logs", "torchelastic dashboard '/logs/a job'"),
        (None, "torchelastic dashboard 'my job'"),
        (os.devnull, "torchelastic dashboard 'my job'"),
    ],
)
def test_how_to_look_again(log_dir, command):
    config = LaunchConfig(run_id="my job", dashboard="auto", log_dir=log_dir)
    assert DashboardProcess(config).again(Path("/logs/a job")) == command
