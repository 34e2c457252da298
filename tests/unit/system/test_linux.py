"""The process tree and the few calls of the kernel, each tried in a process of its own."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from array import array
from textwrap import dedent

import pytest

from tests.support import poll_for
from tests.unit.cli.tables import not_refused, wrong
from torchelastic.metrics.metric_table import MetricTable
from torchelastic.snapshot import layout
from torchelastic.system import linux
from torchelastic.system.devices import workers_for
from torchelastic.timer.timer_table import TimerTable
from torchelastic.worker import status_page
from torchelastic.worker_counters import milestones, stalls


def run(source, *args):
    ended = subprocess.run(
        [sys.executable, "-c", dedent(source), *args], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "1000"])
    yield process.pid
    process.kill()
    process.wait()


def test_children_are_found(child):
    for find in (linux.children, linux._children_by_stat):
        assert child in find(os.getpid())
        assert find(child) == []
    assert linux.start_time(child) >= linux.start_time(os.getpid()) > 0


def test_a_process_that_is_gone_has_no_children():
    process = subprocess.Popen(["true"])
    process.wait()
    assert linux.children(process.pid) == []
    assert linux.start_time(process.pid) == 0


@pytest.mark.parametrize(("command", "expected"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_exit_codes_are_those_of_subprocess(command, expected):
    process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    assert linux.exitcode(pidfd) is None, "it runs"
    process.stdin.close()
    assert poll_for(lambda: linux.exitcode(pidfd), what="the end") == expected
    assert linux.exitcode(pidfd) == 255, "somebody else has reaped it"
    process.wait()  # subprocess finds nothing to reap
    os.close(pidfd)


def test_a_signal_goes_to_one_thread():
    out = run(
        """
        import os, signal, threading
        from torchelastic.system import linux
        mine = signal.SIGRTMIN + 8
        signal.pthread_sigmask(signal.SIG_BLOCK, [mine])
        def wait():
            linux.signal_thread(os.getpid(), threading.get_native_id(), mine)
            print(mine in signal.sigpending())
        made = threading.Thread(target=wait)
        made.start()
        made.join()
        print(mine in signal.sigpending())
        """
    )
    assert out == "True\nFalse\n"


def test_a_signal_that_cannot_be_sent_is_an_error(monkeypatch):
    with pytest.raises(ProcessLookupError):
        linux.signal_thread(2**22 + 1, 2**22 + 1, 0)
    monkeypatch.setattr(linux, "_TGKILL", {})
    with pytest.raises(OSError, match="tgkill system call number"):
        linux.signal_thread(os.getpid(), os.getpid(), 0)


def test_everything_below_is_killed_but_what_is_to_be_kept():
    out = run(
        """
        import os, signal
        from torchelastic.system import linux
        linux.become_subreaper()
        kept = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        reader, writer = os.pipe()
        if os.fork() == 0:
            # A chain of five, each in a session of its own and deaf to SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for _ in range(4):
                if os.fork():
                    break
                os.setsid()
            os.write(writer, b".")
            while True:
                signal.pause()
        os.close(writer)
        said = b""
        while len(said) < 5:
            said += os.read(reader, 10)
        linux.kill_descendants(keep={kept})
        print(os.read(reader, 1), linux.children() == [kept])
        linux.kill_descendants()
        print(linux.children())
        """
    )
    assert out == "b'' True\n[]\n"


def test_a_child_whose_parent_has_gone_before_the_call_ends_itself():
    with pytest.raises(AssertionError):
        run("from torchelastic.system import linux; linux.die_with_parent(1); print('alive')")


def test_a_child_dies_with_its_parent_unless_it_takes_that_back():
    out = run(
        """
        import os, signal, sys
        from torchelastic.system import linux
        linux.become_subreaper()
        def start(then):
            reader, writer = os.pipe()
            parent = os.fork()
            if parent == 0:
                middle = os.getpid()
                if os.fork() == 0:
                    linux.die_with_parent(middle)
                    then()
                    os.write(writer, b"ready")
                    signal.pause()
                signal.pause()
            os.read(reader, 5)
            [child] = linux.children(parent)
            os.kill(parent, 9)
            os.waitpid(parent, 0)
            return child
        dies, lives = start(lambda: None), start(linux.outlive_parent)
        print(os.waitstatus_to_exitcode(os.waitpid(dies, 0)[1]))
        print(os.waitpid(lives, os.WNOHANG))
        os.kill(lives, 9)
        """
    )
    assert out == "-9\n(0, 0)\n"


@pytest.mark.parametrize(
    "command", [("a", "b"), ("x" * 500,), ("",)], ids=["short", "long", "none"]
)
def test_a_process_shows_the_command_line_it_wants(command):
    out = run(
        """
        import sys
        from torchelastic.system import linux
        before = open("/proc/self/cmdline", "rb").read()
        assert linux.write_command_line(sys.argv[1:])
        after = open("/proc/self/cmdline", "rb").read()
        print(len(before) == len(after), after.rstrip(b"\\0"))
        """,
        *command,
    )
    same, _, shown = out.strip().partition(" ")
    assert same == "True"
    assert eval(shown).startswith("\0".join(command).encode()[:100])


def test_threads_are_named():
    assert len(linux.thread_names()) >= 1
    assert run("from torchelastic.system import linux; print(len(linux.thread_names()))") == "1\n"


def test_a_kept_child_is_not_reaped(child):
    os.kill(child, signal.SIGKILL)
    poll_for(lambda: linux._stat(child)[0] == "Z", what="a zombie")
    linux.reap(keep=linux.children())
    assert child in linux.children()


# --- Counting devices in a fake /dev, /proc and /sys ---------------------------------------------


NVIDIA = {f"dev/nvidia{index}": "" for index in range(4)} | {
    "dev/nvidiactl": "",
    "dev/nvidia-uvm": "",
}
DRIVER = {f"proc/driver/nvidia/gpus/0000:0{index}:00.0/information": "" for index in range(2)}
AMD = {
    "sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0\n",  # the CPU
    "sys/class/kfd/kfd/topology/nodes/1/gpu_id": "4711\n",
    "sys/class/kfd/kfd/topology/nodes/2/gpu_id": "4712\n",
}
INTEL = {
    "sys/class/drm/renderD128/device/vendor": "0x8086\n",
    "sys/class/drm/renderD129/device/vendor": "0x1002\n",
}
CPUS = len(os.sched_getaffinity(0))


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


CASES = [
    (7, {}, {}, 7),
    ("cpu", NVIDIA, {}, CPUS),
    ("auto", {}, {}, CPUS),
    ("auto", NVIDIA, {}, 4),
    ("gpu", NVIDIA, {}, 4),
    ("gpu", DRIVER, {}, 2),
    ("gpu", NVIDIA | DRIVER, {}, 4),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "3,9,1"}, 1),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "GPU-ab, MIG-cd"}, 2),
    ("auto", NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, CPUS),
    ("auto", {}, {"CUDA_VISIBLE_DEVICES": "0,1"}, CPUS),
    ("gpu", AMD, {}, 2),
    ("gpu", AMD, {"HIP_VISIBLE_DEVICES": "1"}, 1),
    ("gpu", AMD, {"CUDA_VISIBLE_DEVICES": "0"}, 1),
    ("xpu", INTEL, {}, 1),
    ("auto", INTEL, {}, CPUS),
]


def test_workers(tmp_path):
    for number, (_, files, _, _) in enumerate(CASES):
        plant(tmp_path / str(number), files)
    cases = [
        (asked, environ, tmp_path / str(number), workers)
        for number, (asked, _, environ, workers) in enumerate(CASES)
    ]
    assert wrong(workers_for, cases) == []
    refused = [
        (asked, {}, tmp_path, f"--nproc-per-node {asked}: this machine has no {asked.upper()}")
        for asked in ("gpu", "xpu")
    ]
    assert not_refused(workers_for, refused) == []


# --- The bytes of the memories that processes share: both ends may be of different re ------------


def digest(descriptor):
    size = os.fstat(descriptor).st_size
    return size, hashlib.sha256(os.pread(descriptor, size, 0)).hexdigest()[:16]


def test_a_status_page(monkeypatch):
    clock = iter(range(1, 100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(
        stalls, "seconds", array("d", [0.5 * n for n in range(len(stalls.COUNTED))])
    )
    monkeypatch.setattr(milestones, "samples", 640)
    monkeypatch.setattr(milestones, "micro_batches", 5)
    descriptor = status_page.create()
    try:
        page = status_page.StatusPage(descriptor)
        page.rank = 3
        page.taken_before(7)
        page.entered(2, 40)
        page.entered(2, 41)
        page.publish(1, (2, 41), b"changing" * 600, b"steady" * 9)
        page.publish(4, (2, 42), b"brief")
        page.collectives.enter(2)
        row = page.collectives.row_of("dp")
        page.collectives.launched(5, row, 9, b"ALLREDUCE")
        page.collectives.waits(row, 9, b"ALLREDUCE")
        page.close()
        assert digest(descriptor) == (45056, "ef2b247aaec3ac49")
    finally:
        os.close(descriptor)


def test_a_metric_table():
    table = MetricTable()
    for name, value in (("loss", 0.5), ("accuracy", 1.0), ("loss", 0.25), ("é" * 80, 3)):
        table.put(name, value)
    assert digest(table.descriptor) == (1024, "c7f6adac2b867496")
    table.close()


def test_a_timer_table():
    table = TimerTable()
    first = table.set("a.py:1", 2.5, 100.0)
    table.set("long/" * 80, 1.0, 200.0)
    table.clear(first)
    assert digest(table.descriptor) == (262144, "3d3179dfa5c7d1f6")
    table.close()


def test_a_snapshot_memory():
    descriptor = layout.create(layout.Sizes(10_000, 100, buffers=3))
    memory = layout.Memory(descriptor)
    for step in range(2):
        memory.begin((1, step))[:8] = b"tensors%d" % step
        memory.seal((1, step), b'{"tree":1}', 8, 99, rank=2, size=4)
    memory.pin(memory.freshest())
    memory.note_replicated((1, 0))
    assert digest(descriptor) == (53248, "82fc1890ef788f2b")
    memory.close()
    os.close(descriptor)
