"""Checkpoints at a real S3 server (moto's), over HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.s3_server import PATIENCE, s3_server

SCRIPT = Path(__file__).with_name("s3_store.py")
pytestmark = [pytest.mark.slow, pytest.mark.needs("moto", "s3fs")]


@pytest.mark.timeout(900)
def test_checkpoints_at_an_s3_server(tmp_path):
    """The server, the script and the process that writes import what takes seconds."""
    with s3_server(tmp_path) as endpoint:
        command = [sys.executable, str(SCRIPT), endpoint]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
