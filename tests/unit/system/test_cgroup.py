"""Where a cgroup is, and, where the machine allows it, that one can be made, filled and ended."""

import os
import signal
import subprocess

import pytest

from torchelastic.system import cgroup
from torchelastic.system.cgroup import Cgroup, find_directory, find_own

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
BOUND = "31 23 0:28 /docker/7 /sys/fs/cgroup ro - cgroup2 cgroup2 ro\n"
SPACE = "31 23 0:28 / /my\\040groups rw - cgroup2 cgroup2 rw\n"

MEMORY = "33 31 0:32 /docker/7 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("own", "mounts", "controller", "expected"),
    [
        ("/", V2, "", "/sys/fs/cgroup"),
        ("/user.slice/job", V2, "", "/sys/fs/cgroup/user.slice/job"),
        ("/", HYBRID, "", "/sys/fs/cgroup/unified"),
        ("/docker/7", BOUND, "", "/sys/fs/cgroup"),
        ("/docker/7/x", BOUND, "", "/sys/fs/cgroup/x"),
        ("/docker/77", BOUND, "", None),
        ("/x", SPACE, "", "/my groups/x"),
        ("/..", V2, "", None),
        ("/../other", V2, "", None),
        ("/", V1, "", None),
        ("/", "", "", None),
        (None, V2, "", None),
        ("/docker/7", HYBRID + MEMORY, "memory", "/sys/fs/cgroup/memory"),
        ("/docker/7/x", MEMORY, "memory", "/sys/fs/cgroup/memory/x"),
        ("/docker/8", MEMORY, "memory", None),
        ("/", HYBRID, "memory", None),
        ("/", V2, "memory", None),
    ],
)
def test_the_directory_of_a_cgroup(own, mounts, controller, expected):
    assert find_directory(own, mounts, *filter(None, [controller])) == expected


@pytest.mark.parametrize(
    ("text", "memory", "unified"),
    [
        ("4:memory:/job\n0::/", "/job", "/"),
        ("4:cpu,memory:/a:b\n1:name=systemd:/\n", "/a:b", None),
        ("0::/user.slice\n", None, "/user.slice"),
        ("", None, None),
    ],
)
def test_the_cgroup_of_a_process(text, memory, unified):
    assert (find_own(text, "memory"), find_own(text)) == (memory, unified)


@pytest.fixture
def made():
    group = Cgroup.create()
    yield group
    group.remove()


def inside(group, times=1):
    """A process that joins so often."""
    return subprocess.Popen(
        ["sleep", "1000"], preexec_fn=lambda: [group.join() for _ in range(times)]
    )


@pytest.mark.needs("cgroup")
def test_each_process_has_one_of_its_own_however_often_it_joins(made):
    assert made.processes() == []
    first, second = inside(made), inside(made, times=2)
    assert made.of(second.pid).processes() == [second.pid]
    made.of(first.pid).remove()
    assert first.wait(10) == -signal.SIGKILL
    assert made.processes() == [second.pid]
    made.kill()
    second.wait(10)


@pytest.mark.needs("cgroup")
def test_removing_it_kills_what_is_inside(made):
    process = inside(made)
    assert made.remove()
    assert not os.path.exists(made.path)
    assert process.wait(10) == -signal.SIGKILL
    assert made.remove(), "and once more does no harm"
    assert made.processes() == []


@pytest.mark.parametrize("old", [False, True], ids=["at once", "one by one"])
@pytest.mark.needs("cgroup")
def test_everything_inside_is_killed(made, monkeypatch, old):
    """An old kernel has no file for that."""
    write = cgroup._write

    def refuse_kill(path, text):
        if path.endswith("cgroup.kill"):
            raise FileNotFoundError(path)
        write(path, text)

    processes = [inside(made) for _ in range(2)]
    assert sorted(made.processes()) == sorted(process.pid for process in processes)
    if old:
        monkeypatch.setattr(cgroup, "_write", refuse_kill)
    made.kill()
    assert [process.wait(10) for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.needs("cgroup")
def test_those_of_a_dead_agent_are_found_by_name(made):
    cgroup.remove_all(cgroup.prefix_of(os.getpid()) + "another")
    assert os.path.exists(made.path)
    cgroup.remove_all(cgroup.prefix_of(os.getpid()))
    assert not os.path.exists(made.path)


@pytest.mark.parametrize("home", [None, "/proc/no/such/place", "/proc"])
def test_cgroup_is_none_where_none_can_be_made(monkeypatch, home):
    monkeypatch.setattr(cgroup, "own_directory", lambda: home)
    assert Cgroup.create() is None


def test_one_that_admits_nobody_is_given_up(monkeypatch, tmp_path):
    """A plain directory can be made but has no `cgroup.procs`."""
    monkeypatch.setattr(cgroup, "own_directory", lambda: str(tmp_path))
    assert Cgroup.create() is None
    assert os.listdir(tmp_path) == []
