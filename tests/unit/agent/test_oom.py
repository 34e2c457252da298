"""What the end of a worker has to do with memory: facts in, words out; and where facts are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchelastic.agent.oom import Facts, Memory, Sources, memory_hint

GIGABYTE = 1 << 30
OUTSIDE = (
    "somebody sent SIGKILL: the kernel counts no kill for want of memory; a guard of memory such "
    "as systemd-oomd is not counted either"
)
DEVICE = "out of memory on the device: it had no room for an allocation"
REFUSED = "out of memory: an allocation in main memory was refused"
COUNTED = "the container's count of such kills rose"
PERHAPS = "perhaps out of memory: the kernel has killed a process of this machine"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        # The kernel's counts, of a worker that was killed.
        (Facts(exitcode=-9, in_container=1), f"out of memory: the kernel killed it ({COUNTED})"),
        (
            Facts(exitcode=-9, in_container=2, limit=2 * GIGABYTE),
            f"out of memory: the kernel killed it (limit 2.0 GiB; {COUNTED})",
        ),
        (
            Facts(exitcode=137, in_container=1, limit=300 << 20),
            f"out of memory: the kernel killed it (limit 300 MiB; {COUNTED})",
        ),
        (
            Facts(exitcode=-9, in_container=0, named=True),
            "out of memory: the kernel killed it (its log names the process)",
        ),
        (Facts(exitcode=-9, in_container=0, on_machine=0), OUTSIDE),
        (Facts(exitcode=-9, on_machine=0), OUTSIDE),
        # Somebody else's container.
        (Facts(exitcode=-9, in_container=0, on_machine=5), OUTSIDE),
        (Facts(exitcode=-9), ""),
        # A process that it had started.
        (
            Facts(
                exitcode=1,
                message="RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ",
                in_container=1,
            ),
            f"out of memory: the kernel killed a process it had started ({COUNTED})",
        ),
        (
            Facts(
                exitcode=1,
                message="RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ",
                in_container=0,
            ),
            "",
        ),
        # What errors say themselves.
        (Facts(exitcode=1, message="torch.OutOfMemoryError: CUDA out of memory. Tried"), DEVICE),
        (Facts(exitcode=1, message="torch.cuda.OutOfMemoryError: CUDA out of memory."), DEVICE),
        (Facts(exitcode=1, message="RuntimeError: CUDA out of memory. Tried to"), DEVICE),
        (Facts(exitcode=1, message="MemoryError: "), REFUSED),
        (Facts(exitcode=1, message="MemoryError"), REFUSED),
        (Facts(exitcode=1, message="numpy._core._exceptions._ArrayMemoryError: Unable"), REFUSED),
        (
            Facts(
                exitcode=1,
                message="RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
            ),
            REFUSED,
        ),
        (Facts(exitcode=1, message="OSError: [Errno 12] Cannot allocate memory"), REFUSED),
        (Facts(exitcode=1, message="RuntimeError: std::bad_alloc"), REFUSED),
        # What only speaks of it.
        (Facts(exitcode=1, message="ValueError: no MemoryError here"), ""),
        (Facts(exitcode=1, message="ValueError: CUDA out of memory is what I expected"), ""),
        (Facts(exitcode=1, in_container=1), ""),
        (Facts(exitcode=-11, in_container=1), ""),
    ],
)
def test_memory_hint(facts, words):
    assert memory_hint(facts) == words


def test_a_count_of_the_machine_alone_is_no_certainty():
    assert memory_hint(Facts(exitcode=-9, on_machine=1)).startswith(PERHAPS)


class Kernel:
    """Files as it shows them, of either version of cgroups."""

    def __init__(self, root: Path, *, whole: bool) -> None:
        self.group = root / "pod" / "container"
        self.group.mkdir(parents=True)
        self.sources = Sources(self.group, whole=whole, vmstat=root / "vmstat", log=root / "kmsg")
        self.counts = self.group / ("memory.events" if whole else "memory.oom_control")
        self.tell(container=3, machine=10)

    def tell(self, *, container: int, machine: int) -> None:
        self.counts.write_text(f"oom 1\noom_kill {container}\noom_group_kill 0\n")
        self.sources.vmstat.write_text(f"oom_kill_disable 0\nnr_free 7\noom_kill {machine}\n")


@pytest.fixture(params=[True, False], ids=["v2", "v1"])
def kernel(request, tmp_path):
    return Kernel(tmp_path, whole=request.param)


def test_one_kill_explains_the_end_of_one_worker(kernel):
    memory = Memory(kernel.sources)
    kernel.tell(container=5, machine=12)
    first, second, third = (memory.look(pid, -9, "") for pid in (7, 8, 9))
    assert (first.in_container, first.on_machine) == (2, 2)
    assert (second.in_container, second.on_machine) == (1, 1)
    assert (third.in_container, third.on_machine) == (0, 0)
    memory.close()


def test_who_was_not_killed_explains_nothing(kernel):
    memory = Memory(kernel.sources)
    kernel.tell(container=4, machine=11)
    assert memory.look(7, -11, "").in_container is None
    assert memory.look(8, 1, "ValueError: boom").in_container is None
    assert memory.look(9, 137, "").in_container == 1
    memory.close()


def test_a_kill_elsewhere_on_the_machine(tmp_path):
    """Version 1 does not count what happens in the groups below."""
    for whole, expected in ((True, 0), (False, None)):
        kernel = Kernel(tmp_path / str(whole), whole=whole)
        memory = Memory(kernel.sources)
        kernel.tell(container=3, machine=11)
        assert memory.look(7, -9, "").in_container == expected
        memory.close()


@pytest.mark.parametrize(
    ("whole", "name", "none"),
    [(True, "memory.max", "max"), (False, "memory.limit_in_bytes", "9223372036854771712")],
)
def test_the_least_limit_counts(tmp_path, whole, name, none):
    kernel = Kernel(tmp_path, whole=whole)
    assert kernel.sources.limit() is None
    (kernel.group / name).write_text(f"{none}\n")
    assert kernel.sources.limit() is None
    (kernel.group.parent / name).write_text(f"{3 * GIGABYTE}\n")
    assert kernel.sources.limit() == 3 * GIGABYTE
    (kernel.group / name).write_text(f"{GIGABYTE}\n")
    assert kernel.sources.limit() == GIGABYTE


@pytest.mark.parametrize("text", ["", "oom_kill", "oom_kill \n", "oom_kill many\n", "other 1\n"])
def test_counts_that_cannot_be_read_say_nothing(kernel, text):
    kernel.counts.write_text(text)
    kernel.sources.vmstat.unlink()
    memory = Memory(kernel.sources)
    facts = memory.look(7, -9, "")
    assert (facts.in_container, facts.on_machine) == (None, None)
    assert memory_hint(facts) == ""
    memory.close()


def test_a_machine_without_any_of_it(tmp_path):
    nothing = tmp_path / "nothing"
    memory = Memory(Sources(None, vmstat=nothing, log=nothing))
    assert memory.look(7, -9, "") == Facts(exitcode=-9)
    memory.close()


def has_us(members: Path) -> bool:
    try:
        return str(os.getpid()) in members.read_text().split()
    except OSError:
        return False  # it is going, or has threads only


def counting_files() -> list[Path]:
    """Where the kernel counts for this process, found by who is in a group."""
    own = [path.parent for path in Path("/sys/fs/cgroup").rglob("cgroup.procs") if has_us(path)]
    above = [up for group in own for up in (group, *group.parents)]
    files = [group / "memory.oom_control" for group in own] + [up / "memory.events" for up in above]
    return [file for file in files if file.exists()]


def test_the_sources_of_this_process_are_what_this_machine_has():
    counting = counting_files()
    if not counting:
        pytest.skip("no group at /sys/fs/cgroup counts for this process")
    sources, machine = Sources.find(), Path("/proc/vmstat")
    assert sources.group == counting[0].parent
    assert (sources.killed_in_container() is not None) == ("oom_kill " in counting[0].read_text())
    assert (sources.killed_on_machine() is not None) == ("oom_kill " in machine.read_text())
