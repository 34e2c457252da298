"""Checks side by side, and those that look at files. What asks others is in the process tests."""

import threading

from torchelastic.config import Entry, Grow, LaunchConfig
from torchelastic.doctor import checkup
from torchelastic.doctor.checkup import side_by_side
from torchelastic.doctor.finding import Severity, ok


def test_findings_come_in_the_order_of_the_checks_whoever_is_first():
    second_done = threading.Event()

    def first():
        assert second_done.wait(60)
        return [ok("first", "x")]

    def second():
        second_done.set()
        return [ok("second", "x"), ok("second", "y")]

    found = side_by_side({"first": (first, 60.0), "second": (second, 60.0)})
    assert [finding.check for finding in found] == ["first", "second", "second"]


def test_a_check_that_does_not_end_hides_no_other():
    release = threading.Event()

    def never():
        release.wait(60)
        return []

    found = side_by_side({"slow": (never, 0.01), "quick": (lambda: [ok("quick", "x")], 60.0)})
    release.set()
    assert [(finding.check, finding.verdict) for finding in found] == [
        ("slow", Severity.NOT_CHECKED),
        ("quick", Severity.OK),
    ]
    assert "0.01 s" in found[0].found


def test_a_check_that_fails_says_so_and_hides_no_other():
    def broken():
        raise KeyError("x")

    found = side_by_side({"broken": (broken, 60.0), "quick": (lambda: [ok("quick", "x")], 60.0)})
    assert found[0].verdict is Severity.NOT_CHECKED
    assert "KeyError" in found[0].found
    assert found[1].verdict is Severity.OK


def test_newcomers_that_would_wait_for_ever(tmp_path):
    def told(path):
        grow = Grow.parse(f"after-checkpoint:{tmp_path}/{path}")
        return [finding.verdict for finding in checkup._grow(LaunchConfig(grow=grow))]

    (tmp_path / "there").mkdir()
    assert told("there/*.pt") == told("there") == told("*/last.pt") == []
    assert told("nowhere/last.pt") == [Severity.WARNING]


def test_directories_that_are_written_to(tmp_path):
    grow = Grow.parse(f"after-checkpoint:{tmp_path}/*.pt")
    found = checkup._directories(LaunchConfig(grow=grow, log_dir=str(tmp_path)))
    assert [finding.check for finding in found] == ["log directory", "checkpoint directory"]
    assert checkup._directories(LaunchConfig(log_dir="/dev/null")) == []


def test_what_is_beside_a_script_is_seen_and_a_directory_that_is_no_package_is_not(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    (tmp_path / "random").mkdir()
    entry = Entry("script", str(script))
    assert [finding.verdict for finding in checkup._beside(entry)] == [Severity.OK]
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "random" / "__init__.py").write_text("")
    found = checkup._beside(entry)
    assert [finding.verdict for finding in found] == [Severity.FAULT, Severity.WARNING]
    assert found[0].found.startswith(f"torch in {tmp_path} hides")
    assert found[1].found.startswith(f"random in {tmp_path}")
    assert checkup._beside(Entry("program", str(script))) == []
