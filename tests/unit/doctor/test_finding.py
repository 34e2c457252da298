from torchelastic.doctor.finding import (
    fault,
    has_fault,
    not_checked,
    ok,
    summary,
    warning,
)


def test_only_a_fault_fails_the_examination():
    assert not has_fault([ok("a", "x"), warning("b", "x", "y"), not_checked("c", "x")])
    assert has_fault([ok("a", "x"), fault("b", "x", "y")])


def test_the_summary_counts_the_worst_first_and_names_nothing_that_is_not_there():
    findings = [not_checked("a", ""), ok("b", ""), ok("c", ""), warning("d", ""), fault("e", "")]
    assert summary(findings) == "1 fault, 1 warning, 2 ok, 1 not checked."
    assert summary([*findings, warning("f", ""), fault("g", "")]).startswith("2 faults, 2 warnings")
    assert summary([ok("a", "")]) == "1 ok."


def test_a_finding_for_programs():
    assert warning("clock", "It jumps.", "Hold it.").to_json() == {
        "check": "clock",
        "verdict": "warning",
        "found": "It jumps.",
        "advice": "Hold it.",
    }
