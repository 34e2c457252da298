import dataclasses
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest

from torchelastic.config import LaunchConfig
from torchelastic.errors import ConfigError
from torchelastic.events import job_registry
from torchelastic.events.job_registry import AgentEntry, Registration


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def register(job: str, node: str = "8f2c", *, pid: int | None = None) -> Registration:
    directory = job_registry.directory_for(job, node)
    return job_registry.register(
        job,
        node,
        pid=pid or os.getpid(),
        name="node-a",
        endpoint="node-a:29400",
        command=["train.py", "--lr", "0.1"],
        events=directory / "events.jsonl",
    )


def entry(node: str, started: float, ended: float | None) -> AgentEntry:
    return AgentEntry(
        job="job",
        node=node,
        name=node,
        pid=os.getpid(),
        pid_started=job_registry._start_ticks(os.getpid()) or 0,
        endpoint="",
        command=(),
        events=Path("/none"),
        started=started,
        ended=ended,
    )


def test_an_agent_is_listed_from_its_start_on(runtime_dir):
    assert job_registry.list_jobs() == []
    registration = register("team/job 1")
    (found,) = job_registry.list_jobs()
    (agent,) = found.agents
    assert (found.job, found.alive) == ("team/job 1", True)
    assert (agent.node, agent.name, agent.pid) == ("8f2c", "node-a", os.getpid())
    assert agent.command == ("train.py", "--lr", "0.1")
    assert abs(agent.started - time.time()) < 60
    assert registration.directory.parent.parent == runtime_dir / "torchelastic"
    assert registration.directory.parent.name.startswith("team_job_1-")


def test_an_agent_that_has_ended_stays_among_the_recent():
    register("job").close(143)
    (found,) = job_registry.list_jobs()
    assert not found.alive
    assert found.agents[0].exitcode == 143
    assert found.last_seen == found.agents[0].ended


def test_an_agent_that_was_killed_is_not_alive_nor_is_a_zombie():
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        register("job", pid=sleeper.pid)
        assert job_registry.list_jobs()[0].alive
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert not job_registry.list_jobs()[0].alive
        sleeper.wait()
        assert not job_registry.list_jobs()[0].alive


def test_a_later_process_with_the_same_number_is_not_the_agent():
    registration = register("job")
    registration._entry = AgentEntry(**vars(registration._entry) | {"pid_started": 1})
    registration._write()
    assert not job_registry.list_jobs()[0].alive


def test_live_jobs_come_first_then_the_newest():
    for name in ("old", "older"):
        register(name).close(0)
    register("live")
    register("newest").close(0)
    assert [job.job for job in job_registry.list_jobs()] == ["live", "newest", "older", "old"]


def test_jobs_whose_names_look_alike_are_told_apart():
    register("a/b")
    register("a_b")
    assert len(job_registry.list_jobs()) == 2


def test_a_node_makes_a_plain_directory_name():
    nodes = ["..", "a/b", "", "x" * 300]
    for node in nodes:
        assert register("..", node).directory.parent.parent == job_registry.registry()
    assert {agent.node for agent in job_registry.list_jobs()[0].agents} == set(nodes)


def test_only_the_newest_ended_jobs_are_kept(runtime_dir):
    live = register("live")
    for number in range(job_registry.KEEP_JOBS + 5):
        registration = register(f"job-{number}")
        (registration.directory / "events.jsonl").touch()
        registration.close(0)
    register("last")
    names = [job.job for job in job_registry.list_jobs()]
    assert len(names) == job_registry.KEEP_JOBS
    assert set(names[:2]) == {"live", "last"}
    assert names[2:] == [f"job-{number}" for number in range(24, 6, -1)]
    assert len(list((runtime_dir / "torchelastic").iterdir())) == job_registry.KEEP_JOBS
    assert live.directory.exists()


def test_only_the_newest_ended_agents_of_a_job_are_kept():
    for number in range(job_registry.KEEP_AGENTS + 5):
        registration = register("job", f"n{number}")
        registration.close(0)
    register("job", "last")
    assert len(list(registration.directory.parent.iterdir())) == job_registry.KEEP_AGENTS + 1


@pytest.mark.parametrize(
    ("agents", "expected"),
    [
        ([entry("a", 1, None)], "a"),
        ([entry("a", 1, 5), entry("b", 2, 6)], "ab"),
        ([entry("a", 1, 5), entry("b", 6, None)], "b"),
        ([entry("a", 1, None), entry("b", 6, None)], "ab"),
        ([entry("a", 1, 5), entry("b", 4, 9), entry("c", 8, None)], "abc"),
        ([entry("c", 8, None), entry("a", 1, 5), entry("b", 2, 3)], "c"),
    ],
)
def test_a_run_begins_when_all_earlier_agents_have_ended(agents, expected):
    assert "".join(agent.node for agent in job_registry.latest_run(agents)) == expected


def test_an_agent_file_that_is_not_ours_to_understand_is_left_out():
    registration = register("job")
    (registration.directory / "agent.json").write_text('{"later": "version"}')
    assert job_registry.list_jobs() == []


def test_the_registry_is_private(runtime_dir):
    (runtime_dir / "torchelastic").mkdir(mode=0o777)
    (runtime_dir / "torchelastic").chmod(0o777)
    register("job")
    assert stat.S_IMODE((runtime_dir / "torchelastic").stat().st_mode) == 0o700


def test_a_symbolic_link_is_refused(runtime_dir, tmp_path_factory):
    (runtime_dir / "torchelastic").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(
        ConfigError, match="is not a directory owned by this user: remove it, or set"
    ):
        register("job")
    with pytest.raises(ConfigError, match="is not a directory owned by this user"):
        job_registry.list_jobs()


def test_a_directory_of_another_user_is_refused(monkeypatch):
    base = job_registry.registry()
    base.mkdir()
    monkeypatch.setattr(job_registry, "registry", lambda: base)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="is not a directory owned by this user"):
        job_registry.directory_for("job", "node")


def test_a_runtime_directory_of_another_user_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert job_registry.registry() == tmp_path / f"torchelastic-{uid}"


@pytest.mark.parametrize("value", ["", "/nonexistent"])
def test_without_a_runtime_directory_it_is_the_temporary_one(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert job_registry.registry() == tmp_path / f"torchelastic-{os.getuid()}"


def test_a_registry_that_cannot_be_made_is_named_in_a_sentence(runtime_dir):
    base = job_registry.directory_for("job", "node").parent
    (base / "other").touch()
    with pytest.raises(ConfigError, match="Cannot register the job in"):
        job_registry.directory_for("job", "other")


def test_a_full_disk_does_not_end_a_job(caplog):
    registration = register("job")
    (registration.directory / "agent.json.new").symlink_to("/dev/full")
    registration.close(0)
    assert "will not list this job" in caplog.text


def test_events_path_follows_log_dir_or_the_registry():
    for log_dir, expected in ((None, "registry"), ("/logs", "run"), (os.devnull, "registry")):
        config = LaunchConfig(log_dir=log_dir)
        path = job_registry.events_path(config, Path("/run"), Path("/registry"))
        assert path == Path("/") / expected / "events.jsonl"


# --- nodes that come too late ---------------------------------------------------------------------


def ended(node: str, started: float, end: float | None, **more) -> AgentEntry:
    return dataclasses.replace(entry(node, started, end), command=("train.py", "1"), **more)


DONE = ended("a", 100, 200, finished=True, step=1200)


@pytest.mark.parametrize(
    ("agents", "now", "late"),
    [
        ([], 210, False),
        ([DONE], 210, True),
        ([DONE], 200 + job_registry.LATE_START_TIME, False),
        ([DONE], 190, False),  # the clock was set back: nobody knows when it was
        ([DONE, ended("b", 101, 150, exitcode=143)], 210, True),  # one node had left before the end
        ([ended("a", 100, 200, exitcode=1)], 210, False),
        ([ended("a", 100, 200, exitcode=143)], 210, False),
        ([ended("a", 100, None, pid=2**22 + 1)], 210, False),  # killed
        ([ended("a", 100, None, finished=True)], 210, True),  # it waits for others to hear of it
        ([DONE, ended("b", 205, None)], 210, False),  # it runs again
        ([DONE, ended("b", 205, 208, exitcode=1)], 210, False),  # and has failed
        ([dataclasses.replace(DONE, command=("train.py", "2"))], 210, False),  # another job
    ],
)
def test_job_finished_before_is_found_by_command_and_time(agents, now, late):
    found = job_registry.finished_before(agents, ["train.py", "1"], now)
    assert (found is not None) == late


def test_late_agent_of_a_finished_job_is_rejected_with_a_reason():
    command = ["train.py", "--lr", "0.1"]
    assert job_registry.too_late("job", command) == ""
    registration = register("job")
    assert job_registry.too_late("job", command) == "", "it runs"
    registration.note_closed(1200, finished=True)
    registration.close(0)
    assert re.fullmatch(
        r"Job 'job' finished at step 1200, \d s ago: this node is too late. To run the same "
        r"command again, choose another --rdzv-id.",
        job_registry.too_late("job", command),
    )
    assert job_registry.too_late("another", command) == ""
    register("job").note_closed(-1, finished=True)
    assert "Job 'job' finished " in job_registry.too_late("job", command)
    register("job").close(1)
    assert job_registry.too_late("job", command) == ""
