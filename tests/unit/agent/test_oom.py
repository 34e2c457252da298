"""Memory and the end of a worker: facts in, words out; and where facts are read."""

from pathlib import Path

import pytest

from torchelastic.agent.workers.oom import Facts, OomKills, Sources, memory_hint

GIGABYTE = 1 << 30
OUTSIDE = (
    "the kernel reports no out-of-memory kill; a user, the scheduler or systemd-oomd may have sent "
    "SIGKILL"
)
DEVICE = "out of memory on the device: an allocation failed"
REFUSED = "out of memory: an allocation in main memory failed"
COUNTED = "the container's oom_kill count rose"
PERHAPS = "perhaps out of memory: the kernel killed a process on this machine"


KILLED = "out of memory: the kernel killed"
LOADER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("exitcode", "facts", "words"),
    [
        # The kernel's counts, of a worker that was killed.
        (-9, {"in_container": 1}, f"{KILLED} it ({COUNTED})"),
        (-9, {"in_container": 2, "limit": 2 << 30}, f"{KILLED} it (limit 2.0 GiB; {COUNTED})"),
        (137, {"in_container": 1, "limit": 300 << 20}, f"{KILLED} it (limit 300.0 MiB; {COUNTED})"),
        (-9, {"in_container": 0, "named": True}, f"{KILLED} it (the kernel log names the process)"),
        (-9, {"in_container": 0, "on_machine": 0}, OUTSIDE),
        (-9, {"on_machine": 0}, OUTSIDE),
        # Somebody else's container.
        (-9, {"in_container": 0, "on_machine": 5}, OUTSIDE),
        (-9, {}, ""),
        (1, {"in_container": 1}, ""),
        (-11, {"in_container": 1}, ""),
        # A process that it had started.
        (
            1,
            {"message": LOADER, "in_container": 1},
            f"{KILLED} a process it had started ({COUNTED})",
        ),
        (1, {"message": LOADER, "in_container": 0}, ""),
    ],
)
def test_memory_hint(exitcode, facts, words):
    assert memory_hint(Facts(exitcode=exitcode, **facts)) == words


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", DEVICE),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", DEVICE),
        ("RuntimeError: CUDA out of memory. Tried to", DEVICE),
        ("MemoryError: ", REFUSED),
        ("MemoryError", REFUSED),
        ("numpy._core._exceptions._ArrayMemoryError: Unable", REFUSED),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", REFUSED),
        ("OSError: [Errno 12] Cannot allocate memory", REFUSED),
        ("RuntimeError: std::bad_alloc", REFUSED),
        # What only speaks of it.
        ("ValueError: no MemoryError here", ""),
        ("ValueError: CUDA out of memory is what I expected", ""),
    ],
)
def test_error_text_gives_memory_hint(message, words):
    assert memory_hint(Facts(exitcode=1, message=message)) == words


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
    memory = OomKills(kernel.sources)
    kernel.tell(container=5, machine=12)
    looks = [memory.look(pid, -9, "") for pid in (7, 8, 9)]
    assert [(one.in_container, one.on_machine) for one in looks] == [(2, 2), (1, 1), (0, 0)]
    memory.close()


def test_other_exits_give_no_memory_hint(kernel):
    memory = OomKills(kernel.sources)
    kernel.tell(container=4, machine=11)
    assert memory.look(7, -11, "").in_container is None
    assert memory.look(8, 1, "ValueError: boom").in_container is None
    assert memory.look(9, 137, "").in_container == 1
    memory.close()


def test_a_kill_elsewhere_on_the_machine(tmp_path):
    """Version 1 does not count what happens in the groups below."""
    for whole, expected in ((True, 0), (False, None)):
        kernel = Kernel(tmp_path / str(whole), whole=whole)
        memory = OomKills(kernel.sources)
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
def test_counts_that_cannot_be_read_say_nothing(tmp_path, text):
    kernel = Kernel(tmp_path, whole=True)
    kernel.counts.write_text(text)
    kernel.sources.vmstat.unlink()
    memory = OomKills(kernel.sources)
    assert memory.look(7, -9, "") == Facts(exitcode=-9)
    memory.close()


def test_a_machine_without_any_of_it(tmp_path):
    sources = Sources(None, vmstat=tmp_path / "no", log=tmp_path / "no")
    memory = OomKills(sources)
    assert (memory.look(7, -9, ""), sources.limit()) == (Facts(exitcode=-9), None)
    memory.close()
