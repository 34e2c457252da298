import pytest

from torchelastic.doctor import path_program
from torchelastic.doctor.finding import Verdict, fault, not_checked, ok
from torchelastic.doctor.paths import PATHS, Noted, judge, overall, take


@pytest.mark.parametrize(
    ("exitcode", "noted", "verdict", "words"),
    [
        (0, Noted(found="it works"), Verdict.OK, "It works (3.0 s in all)."),
        (1, Noted(broken="other bits"), Verdict.FAULT, "A thing does not work: other bits."),
        # One rank says it is broken while another one has noted that it is done.
        (0, Noted(found="it works", broken="not here"), Verdict.FAULT, "not here"),
        (None, Noted(doing="waiting"), Verdict.FAULT, "hangs: not done in 180 s while waiting"),
        (1, Noted(), Verdict.FAULT, "failed before it began, with exit code 1"),
        (0, Noted(doing="restoring"), Verdict.FAULT, "failed while restoring"),
    ],
)
def test_how_a_path_ended(exitcode, noted, verdict, words):
    found = judge("cuda thing", "a thing", exitcode, noted, 3.0)
    assert found.verdict is verdict
    assert words in found.found
    assert bool(found.advice) is (verdict is Verdict.FAULT)


def test_a_path_that_needs_two_devices_is_not_taken_with_one():
    (abort,) = [way for way in PATHS if way.name == "abort"]
    found = take(abort, "cuda", 1, {})
    assert found.verdict is Verdict.NOT_CHECKED
    assert "needs 2 devices" in found.found


def test_every_path_has_its_program():
    assert [way.name for way in PATHS] == list(path_program.PATHS)


def test_the_verdict_on_all_paths():
    fine = [ok("a", ""), not_checked("b", "")]
    assert overall(fine) == "All 1 paths that were taken on the GPUs work."
    assert overall(fine[1:]) == "No path on the GPUs was taken."
    assert overall([ok("a", ""), fault("b", "")]) == "1 of 2 paths on the GPUs do not work: b."
