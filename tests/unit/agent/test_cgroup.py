"""Where a cgroup is, and, where the machine allows it, that one can be made, filled and ended."""

import os
import signal
import subprocess

import pytest

from torchelastic.agent import cgroup
from torchelastic.agent.cgroup import Cgroup, find_directory, find_own

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
BOUND = "31 23 0:28 /docker/7 /sys/fs/cgroup ro - cgroup2 cgroup2 ro\n"
SPACE = "31 23 0:28 / /my\\040groups rw - cgroup2 cgroup2 rw\n"

PLACES = [
    ("/", V2, "/sys/fs/cgroup"),
    ("/user.slice/job", V2, "/sys/fs/cgroup/user.slice/job"),
    ("/", HYBRID, "/sys/fs/cgroup/unified"),
    ("/docker/7", BOUND, "/sys/fs/cgroup"),
    ("/docker/7/x", BOUND, "/sys/fs/cgroup/x"),
    ("/docker/77", BOUND, None),
    ("/x", SPACE, "/my groups/x"),
    ("/..", V2, None),
    ("/../other", V2, None),
    ("/", V1, None),
    ("/", "", None),
    (None, V2, None),
]


@pytest.mark.parametrize(("own", "mounts", "expected"), PLACES)
def test_the_directory_of_a_cgroup(own, mounts, expected):
    assert find_directory(own, mounts) == expected


MEMORY = "33 31 0:32 /docker/7 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        ("/docker/7", HYBRID + MEMORY, "/sys/fs/cgroup/memory"),
        ("/docker/7/x", MEMORY, "/sys/fs/cgroup/memory/x"),
        ("/docker/8", MEMORY, None),
        ("/", HYBRID, None),
        ("/", V2, None),
        (None, MEMORY, None),
    ],
)
def test_the_directory_of_a_controller_of_version_1(own, mounts, expected):
    assert find_directory(own, mounts, "memory") == expected


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
    if group is None:
        pytest.skip("cgroups of version 2 are not writable here")
    yield group
    group.remove()


def inside(group):
    return subprocess.Popen(["sleep", "1000"], preexec_fn=group.join)


def test_each_process_has_one_of_its_own(made):
    first, second = inside(made), inside(made)
    assert made.of(first.pid).processes() == [first.pid]
    made.of(first.pid).remove()
    assert first.wait(10) == -signal.SIGKILL
    assert made.processes() == [second.pid]
    made.kill()
    second.wait(10)


def test_a_process_may_join_twice(made):
    def join_twice():
        made.join()
        made.join()

    process = subprocess.Popen(["sleep", "1000"], preexec_fn=join_twice)
    assert made.of(process.pid).processes() == [process.pid]
    made.kill()
    process.wait(10)


def test_it_is_named_after_its_process(made):
    assert os.path.basename(made.path).startswith(cgroup.prefix_of(os.getpid()))
    assert made.processes() == []


def test_everything_inside_is_killed(made):
    processes = [inside(made) for _ in range(3)]
    assert sorted(made.processes()) == sorted(process.pid for process in processes)
    made.kill()
    assert [process.wait(10) for process in processes] == [-signal.SIGKILL] * 3


def test_removing_it_kills_what_is_inside(made):
    process = inside(made)
    assert made.remove()
    assert not os.path.exists(made.path)
    assert process.wait(10) == -signal.SIGKILL
    assert made.remove(), "and once more does no harm"
    assert made.processes() == []


def test_an_old_kernel_without_a_kill_file_kills_one_by_one(made, monkeypatch):
    write = cgroup._write

    def refuse_kill(path, text):
        if path.endswith("cgroup.kill"):
            raise FileNotFoundError(path)
        write(path, text)

    process = inside(made)
    monkeypatch.setattr(cgroup, "_write", refuse_kill)
    made.kill()
    assert process.wait(10) == -signal.SIGKILL


def test_those_of_a_dead_agent_are_found_by_name(made):
    cgroup.remove_all(cgroup.prefix_of(os.getpid()) + "another")
    assert os.path.exists(made.path)
    cgroup.remove_all(cgroup.prefix_of(os.getpid()))
    assert not os.path.exists(made.path)


@pytest.mark.parametrize("home", [None, "/proc/no/such/place", "/proc"])
def test_where_none_can_be_made_there_is_none(monkeypatch, home):
    monkeypatch.setattr(cgroup, "own_directory", lambda: home)
    assert Cgroup.create() is None


def test_one_that_admits_nobody_is_given_up(monkeypatch, tmp_path):
    """A plain directory can be made but has no `cgroup.procs`."""
    monkeypatch.setattr(cgroup, "own_directory", lambda: str(tmp_path))
    assert Cgroup.create() is None
    assert os.listdir(tmp_path) == []
