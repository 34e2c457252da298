"""The directory of a submitted job, on storage that all its nodes share.

    secret      the job's secret, which only its owner can read
    finished    written when the training is complete: a node that starts later has nothing to do
    failed      the exit code of a job that has failed by itself, so that it is not started again

TORCHELASTIC_JOB_DIR names it on the nodes. `torchelastic submit` makes it, or else the first node.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchelastic.errors import ConfigError

_FINISHED = "finished"


@dataclass(frozen=True)
class JobDirectory:
    """A job's directory; `create` or `prepare` makes it."""

    path: Path

    @property
    def secret(self) -> Path:
        return self.path / "secret"

    @classmethod
    def create(cls, path: Path) -> JobDirectory:
        """Create the directory, open to its owner only, with a new secret in it."""
        made = cls(path.absolute())
        try:
            made.path.mkdir(mode=0o700, parents=True)
            write_secret(made.secret)
        except FileExistsError:
            raise ConfigError(
                f"The job directory {path} exists already: name another one, which is created."
            ) from None
        except OSError as error:
            raise _refused(path, error) from None
        return made

    def prepare(self) -> None:
        """Create the directory and a secret in it, unless another node has."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.secret.exists():
                return
            # Several nodes may do this at the same time: the first to link its own decides.
            written = self.path / f"secret.{secrets.token_hex(4)}"
            write_secret(written)
            with suppress(FileExistsError):
                os.link(written, self.secret)
            written.unlink()
        except OSError as error:
            raise _refused(self.path, error) from None

    def note_finished(self, job: str, step: int) -> None:
        """Record that the training is complete, at this step (-1: unknown)."""
        self._write(_FINISHED, json.dumps({"job": job, "step": step, "at": time.time()}))

    def note_failed(self, exitcode: int) -> None:
        """Record that the job has failed by itself."""
        self._write("failed", str(exitcode))

    def why_too_late(self, job: str) -> str:
        """Return why a node of this job need not start; empty: it may."""
        try:
            said = json.loads((self.path / _FINISHED).read_text())
            finished, reached = said["job"], int(said["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        if finished != job:
            return ""
        step = f" at step {reached}" if reached >= 0 else ""
        return f"Job '{job}' finished{step}: this node is too late and has nothing to do."

    def _write(self, name: str, text: str) -> None:
        """Write a file whole; several nodes may write it at the same time."""
        written = self.path / f"{name}.{secrets.token_hex(4)}"
        written.write_text(text)
        written.replace(self.path / name)


def _refused(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"Cannot create the job directory {path} ({error.strerror}): name one on storage that all "
        "nodes share and that you may write to."
    )


def write_secret(path: Path) -> None:
    """Write a new secret to a new file that only its owner can read."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(opened, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
