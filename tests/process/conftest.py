from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def forks() -> None:
    """One process imports torch, and forks the ranks of all tests that use this (`forked`)."""
    from tests.process import forked

    forked.prepare()
