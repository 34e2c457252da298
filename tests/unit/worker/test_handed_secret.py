from __future__ import annotations

import os

import pytest

from torchelastic.transport.auth import Secret
from torchelastic.worker import handed_secret

KEY = b"0123456789abcdef" * 256


@pytest.fixture(autouse=True)
def nothing_handed(monkeypatch):
    monkeypatch.setattr(handed_secret, "_key", None)
    monkeypatch.delenv(handed_secret.VARIABLE, raising=False)


def test_a_worker_takes_it_once_and_leaves_no_trace(monkeypatch):
    descriptor = handed_secret.offer(Secret(KEY))
    monkeypatch.setenv(handed_secret.VARIABLE, str(descriptor))
    handed_secret.adopt()
    assert handed_secret.VARIABLE not in os.environ
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    for _ in range(2):
        secret = handed_secret.secret()
        assert secret is not None
        assert secret.reveal() == KEY


@pytest.mark.parametrize("text", [None, "", "x"])
def test_a_worker_of_a_job_without_a_secret_has_none(monkeypatch, text):
    if text is not None:
        monkeypatch.setenv(handed_secret.VARIABLE, text)
    handed_secret.adopt()
    assert handed_secret.secret() is None
