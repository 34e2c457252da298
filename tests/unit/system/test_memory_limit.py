"""How much memory may be taken, and what is said when it may not."""

import doctest
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from torchelastic.snapshot import layout
from torchelastic.system import memory_limit
from torchelastic.system.memory_limit import Limit

GB = 1 << 30
V1 = Path("/sys/fs/cgroup/memory")


def test_doctests_hold():
    assert doctest.testmod(memory_limit).failed == 0


@pytest.mark.parametrize(
    ("needed", "limits", "allowed"),
    [
        (GB, [], True),
        (GB, [Limit("this machine", 10 * GB, 2 * GB)], True),
        (GB, [Limit("this machine", 10 * GB, 9 * GB)], False),  # some is left alone
        (GB, [Limit("this machine", 10 * GB, 2 * GB), Limit("its cgroup", 2 * GB, GB)], False),
        (GB, [Limit("its cgroup", GB, 2 * GB)], False),
    ],
)
def test_the_tightest_limit_decides(needed, limits, allowed):
    assert (memory_limit.refusal(needed, limits, "it") is None) == allowed


def test_the_refusal_is_one_sentence_that_says_what_to_do():
    limits = [Limit("this machine", 64 * GB, 0), Limit("its cgroup", 2 * GB, GB)]
    assert memory_limit.refusal(3 * GB, limits, "snapshots of 'shared'") == (
        "No room for snapshots of 'shared': they need 3.0 GiB of memory, and 0.9 GiB of the "
        "2.0 GiB of its cgroup are free; give the node more memory, keep less state, or "
        "continue without snapshots."
    )


@pytest.mark.parametrize(
    ("own", "mountinfo", "found"),
    [
        ("0::/", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", ["/sys/fs/cgroup"]),
        (
            "0::/pod/1",
            "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            ["/sys/fs/cgroup/pod/1", "/sys/fs/cgroup/pod", "/sys/fs/cgroup"],
        ),
        # Version 1, as a container sees it: the mount begins at its own cgroup.
        (
            "9:memory:/docker/abc\n2:cpu:/docker/abc",
            "40 30 0:35 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
            ["/sys/fs/cgroup/memory"],
        ),
        # The path is the host's, the mount is not below it.
        (
            "4:memory:/a/b",
            "40 30 0:35 /other /cg/memory rw - cgroup cgroup rw,memory",
            ["/cg/memory"],
        ),
        ("2:cpu:/a", "40 30 0:35 / /cg/memory rw - cgroup cgroup rw,memory", []),
        ("", "", []),
    ],
)
def test_memory_limits_of_all_parents_are_found(own, mountinfo, found):
    assert [path for path, _ in memory_limit.directories(own, mountinfo)] == found


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (("max", "700", ""), None),
        (("9223372036854771712", "700", ""), None),
        (("", "", ""), None),
        (("1000", "700", ""), Limit("its cgroup", 1000, 700)),
        (("1000", "700", "total_inactive_file 100\ncache 5"), Limit("its cgroup", 1000, 600)),
    ],
)
def test_cgroup_v1_files_give_limits(files, limit):
    assert (
        memory_limit.of_cgroup(dict(zip(memory_limit._V1, files, strict=True)), is_v2=False)
        == limit
    )


def test_this_machine_has_limits():
    assert any(limit.place == "this machine" and limit.left > 0 for limit in memory_limit.limits())


LIMITED = """
import sys
from torchelastic.system import memory_limit as room
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
room.check(8 << 20, "snapshots of 'shared'")
try:
    room.check(64 << 20, "snapshots of 'shared'")
except room.NoRoom as error:
    print(error)
"""


@pytest.mark.needs("memory cgroup")
def test_a_real_limit_is_respected():
    """Of a parent: the process itself is in a cgroup below it, without a limit."""
    limited = V1 / f"torchelastic-test-{uuid.uuid4().hex[:8]}"
    inner = limited / "inner"
    inner.mkdir(parents=True)
    try:
        (limited / "memory.limit_in_bytes").write_text(str(60 << 20))
        said = subprocess.run(
            [sys.executable, "-c", LIMITED, str(inner)], capture_output=True, text=True, check=True
        )
    finally:
        inner.rmdir()
        limited.rmdir()
    assert said.stdout.startswith("No room for snapshots of 'shared': they need 64.0 MiB")
    assert "of the 60.0 MiB of its cgroup are free" in said.stdout


SMALL_SHM = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
with open("/dev/shm/full", "wb") as file:
    try:
        file.write(bytes(2 << 20))
        file.flush()
    except OSError as error:
        print(error.errno)
from torchelastic.snapshot import layout
memory = layout.Memory(layout.create(layout.Sizes(8 << 20, 100)))
memory.begin((0, 1))[:] = bytes(8 << 20)
print("kept")
os._exit(0)
"""


@pytest.mark.needs("mount")
def test_a_full_dev_shm_is_no_limit():
    said = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", SMALL_SHM],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["28", "kept"]


def test_memory_is_taken_at_once():
    """So that it is refused here, and not in the middle of a step by a signal."""
    descriptor = layout.create(layout.Sizes(1 << 20, 100))
    try:
        assert os.fstat(descriptor).st_blocks * 512 >= 2 << 20
    finally:
        os.close(descriptor)
