"""Certificates for tests, made by the `openssl` program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files."""

    cert: str
    key: str


class Authority:
    """Signs certificates, and is known by its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        own = self._make(name, "-x509", "-addext", "basicConstraints=critical,CA:TRUE")
        self.cert, self._key = own.cert, own.key

    def issue(self, name: str, *hosts: str, subject: str = "") -> Certificate:
        """For `hosts` (`IP:127.0.0.1`, `DNS:localhost`), where clients compare them."""
        options = ["-CA", self.cert, "-CAkey", self._key, "-addext", "basicConstraints=CA:FALSE"]
        if hosts:
            options += ["-addext", f"subjectAltName={','.join(hosts)}"]
        return self._make(f"{self._name}-{name}", "-x509", *options, subject=subject)

    def _make(self, name: str, *options: str, subject: str = "") -> Certificate:
        made = Certificate(
            str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key")
        )
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        files = ("-keyout", made.key, "-out", made.cert)
        whose = ("-subj", subject or f"/CN={name}", "-days", "2")
        command = ["openssl", "req", *options, *key, *files, *whose]
        subprocess.run(command, check=True, capture_output=True)
        return made
