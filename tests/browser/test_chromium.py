"""Where there is no browser the tests say so, or fail if there should be one."""

from __future__ import annotations

import pytest

from tests.browser import conftest
from tests.etcd import MUST_BE_THERE


def test_without_a_browser_tests_are_skipped_unless_it_was_installed(monkeypatch):
    monkeypatch.setattr(conftest.shutil, "which", lambda name: None)
    monkeypatch.delenv(MUST_BE_THERE, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no chromium.* here: install"):
        conftest.need_chromium()
    monkeypatch.setenv(MUST_BE_THERE, "1")
    with pytest.raises(pytest.fail.Exception, match=r"no chromium.* here: install"):
        conftest.need_chromium()
