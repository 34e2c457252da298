import pytest

from torchelastic.doctor import gpu_program
from torchelastic.doctor.finding import Severity, fault, not_checked, ok
from torchelastic.doctor.gpu_jobs import (
    PATHS,
    PathResult,
    WorkerNotes,
    judge,
    named,
    overall,
    report_text,
    take,
)


@pytest.mark.parametrize(
    ("exitcode", "noted", "verdict", "words"),
    [
        (0, WorkerNotes(found="it works"), Severity.OK, "It works (3.0 s in all)."),
        (1, WorkerNotes(broken="other bits"), Severity.FAULT, "A thing does not work: other bits."),
        # One rank says it is broken while another one has noted that it is done.
        (0, WorkerNotes(found="it works", broken="not here"), Severity.FAULT, "not here"),
        (
            None,
            WorkerNotes(doing="waiting"),
            Severity.FAULT,
            "hung: timed out in 180 s while waiting",
        ),
        (1, WorkerNotes(), Severity.FAULT, "failed before it started with exit code 1"),
        (0, WorkerNotes(doing="restoring"), Severity.FAULT, "failed while restoring"),
    ],
)
def test_how_a_path_ended(exitcode, noted, verdict, words):
    found = judge("cuda thing", "a thing", exitcode, noted, 3.0)
    assert found.verdict is verdict
    assert words in found.found
    assert bool(found.advice) is (verdict is Severity.FAULT)


def test_a_path_that_needs_two_devices_is_not_taken_with_one():
    (abort,) = [way for way in PATHS if way.name == "abort"]
    found = take(abort, "cuda", 1, {}).finding
    assert found.verdict is Severity.NOT_CHECKED
    assert "needs 2 devices" in found.found


def test_every_path_has_its_program():
    assert [way.name for way in PATHS] == list(gpu_program.PATHS)


def test_the_verdict_on_all_paths():
    fine = [ok("a", ""), not_checked("b", "")]
    assert overall(fine) == "All 1 tested GPU paths work."
    assert overall(fine[1:]) == "No GPU path was tested."
    assert overall([ok("a", ""), fault("b", "")]) == "1 of 2 GPU paths do not work: b."


@pytest.mark.parametrize(
    ("hangs", "found", "wrong"),
    [
        ([{"missing": [1], "text": "rank 1 is missing"}], "detected: rank 1 is missing", ""),
        (
            [{"missing": [0], "text": "rank 0 is missing"}],
            "",
            "rank 1 slept, but the reported hang was",
        ),
        ([], "", "the hang was not detected"),
    ],
)
def test_a_hang_is_found_only_if_the_sleeper_is_named(hangs, found, wrong):
    said, why = named(hangs, 1)
    assert found in said
    assert wrong in why
    assert bool(said) is not bool(why)


def test_the_report_has_what_an_issue_needs_and_no_secrets():
    environ = {"NCCL_DEBUG": "INFO", "TORCHELASTIC_SECRET": "hush", "HOME": "/home/me"}
    taken = [
        PathResult(ok("cuda zygote", "It works."), 2.0),
        PathResult(
            fault("cuda abort", "It hangs."),
            180.0,
            "Traceback: Boom",
            {"0/stderr.log": "NCCL WARN"},
        ),
    ]
    told = report_text(
        "1.0", "Linux", environ, "0, A100", [ok("torch", "torch 2.13.0 (CUDA 13.0).")], taken
    )
    for words in (
        "torchelastic 1.0 on Linux",
        "1 of 2 GPU paths do not work: cuda abort.",
        "ok           cuda zygote (2.0 s): It works.",
        "fault        cuda abort (180.0 s): It hangs.",
        "0, A100",
        "torch: torch 2.13.0 (CUDA 13.0).",
        "NCCL_DEBUG=INFO",
        "## cuda abort\n\nTraceback: Boom\n\n--- 0/stderr.log\nNCCL WARN",
    ):
        assert words in told
    assert "hush" not in told
    assert "/home/me" not in told
