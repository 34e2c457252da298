"""What is refused before anything starts: files, modules, programs, directories, platforms."""

import sys

import pytest

from torchelastic.cli import checks
from torchelastic.config import Entry
from torchelastic.errors import ConfigError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory to work in, with something of each kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('a check must not run this')")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise AssertionError('nor this')")
    (tmp_path / "runnable").mkdir()
    (tmp_path / "runnable" / "__main__.py").write_text("")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "beside.py").write_text("")
    (tmp_path / "inner" / "main.py").write_text("")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("script", "train.py"),
        ("script", "runnable"),
        ("script", "shard-${local_rank}.py"),
        ("module", "package"),
        ("module", "package.sub"),
        ("module", "json.tool"),
        ("module", "torchelastic"),
        ("program", "./tool"),
        ("program", "sh"),
    ],
)
def test_what_can_run_passes(here, kind, target):
    checks.check_entry(Entry(kind, target), {"PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize(
    ("kind", "target", "sentence"),
    [
        ("script", "gone.py", "There is no script 'gone.py' in "),
        ("script", "package", "'package' is a directory without __main__.py"),
        ("module", "gone.away", "There is no module 'gone.away' here"),
        ("module", "train.py", "'train.py' is a file, no module: leave -m out."),
        ("module", "", "There is no module ''"),
        ("program", "gone", "There is no program 'gone' to run"),
        ("program", "./train.py", "make the file executable"),
    ],
)
def test_what_cannot_run_is_refused(here, kind, target, sentence):
    with pytest.raises(ConfigError, match=sentence):
        checks.check_entry(Entry(kind, target), {"PATH": "/usr/bin:/bin"})


def test_modules_of_another_python_are_not_judged(here):
    checks.check_entry(Entry("module", "gone"), {"PYTHON_EXEC": "/opt/python"})


def test_preloaded_modules_may_lie_beside_the_script(here):
    checks.check_preload(("beside", "json", "package"), Entry("script", "inner/main.py"))
    with pytest.raises(ConfigError, match="--preload: there is no module 'beside' here"):
        checks.check_preload(("beside",), Entry("script", "train.py"))


@pytest.mark.parametrize("path", [None, "/dev/null"])
def test_no_log_directory_is_fine(path):
    checks.prepare_log_dir(path)


def test_a_missing_log_directory_is_made(here):
    checks.prepare_log_dir("a/b")
    checks.prepare_log_dir("a/b")
    assert (here / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("train.py", "--log-dir train.py is not a directory"),
        ("train.py/logs", "--log-dir train.py/logs cannot be made .Not a directory.: name another"),
        ("/proc/logs", "--log-dir /proc/logs cannot be made"),
    ],
)
def test_an_unusable_log_directory_is_refused(here, path, sentence):
    with pytest.raises(ConfigError, match=sentence):
        checks.prepare_log_dir(path)


def test_a_log_directory_without_permissions_is_refused(monkeypatch, here):
    # The superuser may write anywhere: let the system call say what it says to others.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be read and written: change its permissions"):
        checks.prepare_log_dir("inner")


def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="runs on Linux only, and this is darwin"):
        checks.check_platform()
