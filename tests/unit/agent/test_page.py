"""The agent's end of the page: what it makes of a process that does anything."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from torchelastic.agent import linux, page
from torchelastic.agent.page import Page
from torchelastic.config import LaunchConfig
from torchelastic.errors import ConfigError, SpawnError

URL = '{"url": "http://127.0.0.1:1/"}'


def made(**config):
    return Page.wanted(LaunchConfig(run_id="job", dashboard="127.0.0.1:0", **config))


@pytest.fixture
def instead(monkeypatch):
    """Start another program than the page."""
    start = page.start_program

    def use(code):
        def start_other(command, **more):
            return start([sys.executable, "-c", code], **more)

        monkeypatch.setattr(page, "start_program", start_other)

    return use


def watched(it):
    """What is said of it until it has ended."""
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


def test_it_is_off_unless_asked_for():
    assert Page.wanted(LaunchConfig()) is None


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_file_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--dashboard-token-file"):
        made(dashboard_token_file=str(path))


def test_where_it_is_goes_to_the_terminal_only(instead, caplog):
    caplog.set_level("INFO")
    instead(f"print('''{URL}''')")
    assert watched(made()) == ["the dashboard has ended: exit code 0; the job goes on"]
    assert "dashboard: http://127.0.0.1:1/" in caplog.text


def test_why_it_is_nowhere_is_said(instead):
    instead("""print('{"error": "Address already in use"}')""")
    (said,) = watched(made())
    assert said == "no dashboard at 127.0.0.1:0: Address already in use; the job goes on"


@pytest.mark.parametrize(
    "code",
    [
        "",
        "print('hello from sitecustomize'); print([1]); print('{}'); print('\\xff')",
        "print('x' * 1_000_000)",
        "import os; os.write(1, b'\\xff\\x00{')",
    ],
)
def test_a_process_that_says_what_it_likes_does_no_harm(instead, code):
    instead(code)
    (said,) = watched(made())
    assert said.startswith("the dashboard has ended: ")


def test_its_address_is_found_among_what_others_print(instead, caplog):
    caplog.set_level("INFO")
    instead(f"print('hello', flush=True); print('''{URL}''')")
    watched(made())
    assert "dashboard: http://127.0.0.1:1/" in caplog.text


def test_it_is_asked_to_end_and_then_ended(instead, monkeypatch):
    monkeypatch.setattr(page, "GRACE", 0.1)
    instead("import time; time.sleep(600)")
    it = made()

    async def run():
        (pid,) = it.start({}, "id")
        await it.close()
        assert not Path(f"/proc/{pid}").exists()

    asyncio.run(run())


def test_it_may_end_by_itself_when_asked(instead, monkeypatch):
    monkeypatch.setattr(page, "GRACE", 600.0)
    instead("import sys; sys.stdin.read()")
    it = made()

    async def run():
        it.start({}, "id")
        await asyncio.wait_for(it.close(), 60)

    asyncio.run(run())


def test_one_that_cannot_be_started_costs_nothing_else(monkeypatch, caplog):
    def refuse(*args, **more):
        raise SpawnError("no more processes.")

    monkeypatch.setattr(page, "start_program", refuse)
    assert watched(made()) == []
    assert "no dashboard: no more processes. The job goes on." in caplog.text


def test_it_runs_out_of_the_way(instead, monkeypatch):
    instead(
        "import os, json; told = [os.nice(0), open('/proc/self/oom_score_adj').read().strip()]\n"
        "if os.path.exists('/proc/self/autogroup'):\n"
        "    told += open('/proc/self/autogroup').read().split()[-1:]\n"
        "print(json.dumps({'error': ' '.join(map(str, told))}))"
    )
    (said,) = watched(made())
    assert f"{linux.POLITE} 1000" in said


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
    assert Page(config).again(Path("/logs/a job")) == command
