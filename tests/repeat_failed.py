"""Run pytest; repeat each failed test once, alone, to tell a flaky test from a broken one.

    python -m tests.repeat_failed FILE [ARGUMENT OF PYTEST ...]

A test that passes when repeated is printed as FLAKY, appended to FILE, and does not fail the run,
unless FILE then has more than three. Collection errors, interrupts and internal errors of pytest
fail the run at once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: More flaky tests than this fail the run.
MOST_FLAKY = 3

#: If more tests fail, none is repeated: the code is broken, and CI has no time for it.
MOST_REPEATED = 10


class Failures:
    """A pytest plugin: collects the ids of failed tests, and whether files were not collected."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}
        self.not_collected = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Also called for a test during which a process of pytest-xdist crashed.
        if report.failed:
            self.tests[_without_group(report.nodeid)] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.not_collected |= report.failed


def _without_group(nodeid: str) -> str:
    """Remove what pytest-xdist appends to the id of a test in a group: `@group`."""
    at = nodeid.rfind("@")
    return nodeid[:at] if at > nodeid.rfind("]") else nodeid


def main(flaky_file: Path, arguments: list[str]) -> int:
    failures = Failures()
    code = int(pytest.main(arguments, plugins=[failures]))
    tests = list(failures.tests)
    if code != pytest.ExitCode.TESTS_FAILED or failures.not_collected or not tests:
        return code
    if len(tests) > MOST_REPEATED:
        print(f"{len(tests)} tests failed, more than {MOST_REPEATED}: not repeated.", flush=True)
        return code
    failed = []
    for test in tests:
        print(f"\nRepeating {test} alone", flush=True)
        # One process each: a test that crashes it leaves the others their turn.
        if subprocess.run([sys.executable, "-m", "pytest", "-n0", test]).returncode:
            failed.append(test)
        else:
            with flaky_file.open("a") as file:
                file.write(f"FLAKY {test}\n")
    flaky = flaky_file.read_text().splitlines() if flaky_file.exists() else []
    print("\n" + "\n".join([*flaky, *(f"FAILED twice {test}" for test in failed)]))
    if len(flaky) > MOST_FLAKY:
        print(f"{len(flaky)} flaky tests, more than {MOST_FLAKY}: the run fails.")
    return code if failed or len(flaky) > MOST_FLAKY else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
