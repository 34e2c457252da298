"""Checks side by side. What they look at is in the process tests."""

import threading

from torchelastic.doctor.examination import side_by_side
from torchelastic.doctor.finding import Verdict, ok


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
        ("slow", Verdict.NOT_CHECKED),
        ("quick", Verdict.OK),
    ]
    assert "0.01 s" in found[0].found


def test_a_check_that_fails_says_so_and_hides_no_other():
    def broken():
        raise KeyError("x")

    found = side_by_side({"broken": (broken, 60.0), "quick": (lambda: [ok("quick", "x")], 60.0)})
    assert found[0].verdict is Verdict.NOT_CHECKED
    assert "KeyError" in found[0].found
    assert found[1].verdict is Verdict.OK
