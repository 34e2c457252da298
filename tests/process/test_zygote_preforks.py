"""Copies made ahead: they are used, replaced, left alone, and never left behind."""

import os
import signal
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process.bench import bench
from tests.process.jobs import state_of
from tests.support import poll_for
from torchelastic import env
from torchelastic.agent.workers.supervisor import WorkerSpawn
from torchelastic.config import Entry
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup

COUNT = 2


@pytest.fixture
def environ():
    return with_light_torch()


@pytest.fixture
def others():
    """Children that tests before this one share and keep: servers, helpers of multiprocessing."""
    return set(linux.children())


@pytest.fixture
def made(tmp_path, environ, others):
    (tmp_path / "train.py").write_text("import signal; signal.pause()")
    with bench(tmp_path) as made:
        made.start_zygote(Entry("script", str(tmp_path / "train.py")), environ, preforks=COUNT)
        assert made.supervisor.alive == ()
        wait_for_preforks(made)
        yield made


def wait_for_preforks(made):
    made.until(lambda: len(made.zygote.preforks()) == COUNT, "preforks")
    poll_for(
        lambda: made.zygote.preforks() <= set(linux.children()),
        what="preforks that are our children",
    )


def start(made, environ, count):
    entry = Entry("script", str(made.directory / "train.py"))
    spawns = [WorkerSpawn(local_rank=rank, entry=entry, env=environ) for rank in range(count)]
    return set(made.do(made.supervisor.start(spawns)).values())


def test_preforks_become_the_workers_and_are_replaced(made, environ, others):
    for _ in range(3):
        ready = made.zygote.preforks()
        assert start(made, environ, COUNT) == ready
        wait_for_preforks(made)
        made.do(made.supervisor.stop(timeout=60))
        assert len(made.zygote.preforks()) == COUNT, "stopping workers leaves them alone"
        assert set(linux.children()) - others == {made.zygote.pid, *made.zygote.preforks()}


@pytest.mark.needs("cgroup")
def test_preforks_are_in_the_cgroup_of_the_workers(tmp_path, environ):
    cgroup = Cgroup.create()
    assert cgroup is not None
    (tmp_path / "train.py").write_text("import signal; signal.pause()")
    with bench(tmp_path, cgroup) as made:
        made.start_zygote(Entry("script", str(tmp_path / "train.py")), environ, preforks=COUNT)
        assert made.supervisor.alive == ()
        for _ in range(2):
            wait_for_preforks(made)
            ready = made.zygote.preforks()
            poll_for(lambda: ready <= set(cgroup.processes()), what="preforks in the cgroup")  # noqa: B023
            assert start(made, environ, COUNT) == ready
            wait_for_preforks(made)
            made.do(made.supervisor.stop(timeout=60))
            ready = made.zygote.preforks()  # only workers were killed
            poll_for(lambda: set(cgroup.processes()) == ready, what="preforks alone")  # noqa: B023
            assert {
                int(path.name) for path in Path(cgroup.path).iterdir() if path.is_dir()
            } == ready


def test_more_workers_than_preforks_are_forked_as_well(made, environ):
    ready = made.zygote.preforks()
    assert start(made, environ, COUNT + 1) > ready


def test_one_that_was_killed_is_not_used(made, environ):
    victim = min(made.zygote.preforks())
    os.kill(victim, signal.SIGKILL)
    poll_for(lambda: state_of(victim) == "Z", what="its end")
    started = start(made, environ, COUNT)
    assert victim not in started
    assert len(started) == COUNT


def test_preforks_end_with_the_zygote(made, environ, others):
    ready = made.zygote.preforks()
    os.kill(made.zygote.pid, signal.SIGKILL)
    poll_for(lambda: all(state_of(pid) == "Z" for pid in ready), what="their end")
    workers = start(made, environ, COUNT)  # plain processes
    assert not workers & ready
    made.do(made.supervisor.stop(timeout=60))
    assert set(linux.children()) <= {made.zygote.pid, *others}, "and they are reaped"


def test_closing_the_zygote_ends_them(made):
    ready = made.zygote.preforks()
    made.do(made.zygote.close())
    assert not ready & set(linux.children())
    assert made.zygote.preforks() == set()


def test_preforks_show_in_their_name_what_they_are(made):
    for pid in made.zygote.preforks():
        with open(f"/proc/{pid}/cmdline") as file:
            assert file.read().startswith("torchelastic-zygote\0")


@pytest.mark.slow
def test_a_worker_that_comes_later_finds_our_modules_imported(tmp_path):
    """Each would import them in turn, on the way back from a failure."""
    there = "'torchelastic.training.torch_state' in sys.modules"
    script = f"import sys; open({str(tmp_path / 'told')!r}, 'w').write(str({there}))"
    (tmp_path / "train.py").write_text(script)
    with bench(tmp_path) as made:
        made.start_zygote(Entry("script", str(tmp_path / "train.py")), env.snapshot(), preforks=1)
        made.until(lambda: len(made.zygote.preforks()) == 1, "a prefork")
        entry = Entry("script", str(tmp_path / "train.py"))
        spawn = WorkerSpawn(local_rank=0, entry=entry, env=env.snapshot())
        made.do(made.supervisor.start([spawn]))
        made.until(lambda: made.exits, "its end")
        assert (tmp_path / "told").read_text() == "True"
