"""The findings of checks. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class Severity(str, enum.Enum):
    """The severity of a finding; only a fault makes `doctor` fail."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Severity
    #: The fact, in one sentence.
    found: str
    #: What to do, in one sentence; empty if there is nothing to do or `found` says it.
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return {
            "check": self.check,
            "verdict": self.verdict.value,
            "found": self.found,
            "advice": self.advice,
        }


def ok(check: str, found: str) -> Finding:
    return Finding(check, Severity.OK, found)


def warning(check: str, found: str, advice: str = "") -> Finding:
    return Finding(check, Severity.WARNING, found, advice)


def fault(check: str, found: str, advice: str = "") -> Finding:
    return Finding(check, Severity.FAULT, found, advice)


def not_checked(check: str, found: str, advice: str = "") -> Finding:
    return Finding(check, Severity.NOT_CHECKED, found, advice)


def has_fault(findings: Sequence[Finding]) -> bool:
    return any(finding.verdict is Severity.FAULT for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line: the number of findings of each verdict, the worst first.

    >>> summary([ok("a", ""), ok("b", ""), fault("c", "")])
    '1 fault, 2 ok.'
    """
    counts = Counter(finding.verdict for finding in findings)
    words = [
        _count(counts[Severity.FAULT], "fault", "faults"),
        _count(counts[Severity.WARNING], "warning", "warnings"),
        _count(counts[Severity.OK], "ok", "ok"),
        _count(counts[Severity.NOT_CHECKED], "not checked", "not checked"),
    ]
    return ", ".join(filter(None, words)) + "."


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}" if number else ""
