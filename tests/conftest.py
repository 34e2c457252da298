"""Tests with real processes and sockets leave nothing behind, and touch nothing outside.

How the suite is run: several processes (pytest-xdist), each with ports, directories and servers of
its own. Real processes come first, because they wait most; unit tests fill the gaps, one file at a
time; tests marked `alone` come last, in one process, when no other test runs.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests import needs, ports
from tests.etcd import etcd, etcd_on_path, some_etcd
from tests.kubernetes import control_plane, namespace
from tests.leaks import Leaks, Snapshot
from tests.support import SOAK

__all__ = ["control_plane", "etcd", "etcd_on_path", "namespace", "some_etcd"]

# Examples are the same in every run, whatever else the process has loaded: Hypothesis would also
# draw from the constants of all loaded modules of the project, which it parses for that. An example
# may take as long as the machine needs.
hypothesis.settings.register_profile(
    "torchelastic", deadline=None, derandomize=SOAK == 1, database=None
)
hypothesis.settings.load_profile("torchelastic")
assert callable(providers._get_local_constants)
providers._get_local_constants = lambda: providers._local_constants

#: Directories whose tests use real processes and sockets.
_REAL = ("browser", "process", "contract", "frameworks")

#: What a test needs that uses one of these fixtures.
_NEEDS_OF_FIXTURES = {
    "authority": ("openssl",),
    "browser": ("chromium", "playwright"),
    "control_plane": ("control plane", "etcd", "kubectl", "kubernetes", "openssl"),
    "etcd_on_path": ("etcd",),
    "other_authority": ("openssl",),
    "seeds_etcd": ("etcd",),
    "some_etcd": ("etcd",),
    "tls": ("openssl",),
}

#: How long what a test has ended may take to be gone, on a busy machine.
_PATIENCE = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skips", action="store_true", help="Show which tests would be skipped here and why."
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control ignores SIGINT in what it starts in the background, and `nohup`
    # ignores SIGHUP; what tests start would inherit that.
    for signum in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ports.free_port()  # opens what stays open
    # Until all tests are collected almost nothing becomes garbage; looking for it takes a third of
    # the time.
    gc.disable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More than there are processors: most tests wait most of the time. Each imports torch, too."""
    return 3 * len(os.sched_getaffinity(0)) // 2


# --- order ---------------------------------------------------------------------------------------


def pytest_itemcollected(item: pytest.Item) -> None:
    """Say what it needs and whom it runs with; xdist reads that when all are collected."""
    for fixture in _NEEDS_OF_FIXTURES.keys() & item.fixturenames:  # type: ignore[attr-defined]
        item.add_marker(pytest.mark.needs(*_NEEDS_OF_FIXTURES[fixture]))
    if (group := _group(item)) is not None:
        item.add_marker(pytest.mark.xdist_group(group))
    if SOAK > 1:
        item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(trylast=True)  # after those that choose or shuffle
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SOAK == 1:
        long = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    items.sort(key=_turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what is loaded stays; `gc.collect` in a test looks at what that test made
    gc.enable()
    gc.set_threshold(10_000)  # models and simulations make many small objects, and few cycles
    # pytest-xdist 3.8 with pytest 9.2 loses the groups without a word.
    if hasattr(session.config, "workerinput"):
        lost = [item.nodeid for item in session.items if _group(item) and "@" not in item.nodeid]
        assert not lost, "this pytest-xdist cannot group the tests with this pytest"


def _directory(item: pytest.Item) -> str:
    """The one under `tests` that an item is in."""
    return _directory_of(item.path)


@cache
def _directory_of(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def _group(item: pytest.Item) -> str | None:
    """The name of those that run one after the other in one process; None for one by itself.

    Tests that share a fixture do, so that it is made once.
    """
    if _is_alone(item):
        return "alone"
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    for name, (*_, found) in sorted(definitions.items()):
        if found.scope != "function" and found.baseid.startswith("tests"):
            return f"{found.baseid}:{name}"
    return None


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _turn(item: pytest.Item) -> int:
    if _is_alone(item):
        return 3
    if _directory(item) not in _REAL:
        return 2
    return 0 if item.get_closest_marker("slow") else 1


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Before its time is counted, a test marked `alone` waits for the last of the others to end."""
    with _room(item):
        return (yield)


@contextmanager
def _room(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):  # there is one process
        yield
        return
    # Beside the temporary directories of all processes of this run.
    shared = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    with (shared / "room").open("a+") as lock:
        # Not flock: what a test has forked and left running would hold that as well.
        fcntl.lockf(lock, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
        yield


# --- what tests need -----------------------------------------------------------------------------


def _lacks(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """Names of what a test needs and this machine lacks, with the reason."""
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if reason := needs.missing(name):
                yield name, reason


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, reason in _lacks(item):
        (pytest.fail if needs.must_fail(name) else pytest.skip)(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.getoption("--skips"):
        return None
    reasons = Counter(next(_lacks(item), ("", ""))[1] for item in session.items)
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    terminal.write_line(f"\n{reasons.pop('', 0):5d} tests run here")
    for reason, skipped in sorted(reasons.items()):
        terminal.write_line(f"{skipped:5d} skipped: {reason}")
    return True


# --- what tests leave ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Own runtime and temporary directories; no process, thread or descriptor afterwards."""
    if _directory(request.node) not in _REAL:
        yield
        return
    runtime_dir = _private_directories(request)
    before = Snapshot.take()
    yield
    leaks = Leaks(before, mark=f"XDG_RUNTIME_DIR={runtime_dir}\0")
    left = leaks.wait_for_none(_PATIENCE)
    if left:
        leaks.kill_processes()
        pytest.fail("The test left behind:\n  " + "\n  ".join(left), pytrace=False)


_directories = count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, which lists all directories of the run before it makes the next."""
    name = re.sub(r"\W", "_", request.node.name)[:26]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_directories)}"
    path.mkdir(mode=0o700)
    return path


def _private_directories(request: pytest.FixtureRequest) -> Path:
    """Short names: the path of a Unix socket may have 107 bytes."""
    tmp_path: Path = request.getfixturevalue("tmp_path")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    runtime_dir, temporary = tmp_path / ".x", tmp_path / ".t"
    runtime_dir.mkdir(mode=0o700)
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it remembers the first answer
    return runtime_dir


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """A disk that is full after so many bytes, made by the kernel's limit on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
