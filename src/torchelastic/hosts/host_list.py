"""The hosts of a job and their workers: `--hosts host1:8,host2:8` or `--hosts-from`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchelastic.errors import ConfigError

#: Seconds that a command may take to print the hosts.
COMMAND_TIMEOUT = 30.0

_HOST = re.compile(r"(?P<user>[^@\s]+@)?(?P<name>\[[0-9a-fA-F:.%\w]+\]|[\w.-]+)(:(?P<slots>\d+))?")


@dataclass(frozen=True)
class HostSlots:
    """One host and its number of workers; 0: as `--nproc-per-node` says."""

    #: As ssh takes it: a name or address, with `user@` if needed.
    target: str
    slots: int = 0

    @property
    def address(self) -> str:
        """Where other hosts reach it: without a user or brackets."""
        return self.target.rpartition("@")[2].strip("[]")

    def __str__(self) -> str:
        return self.target


def parse_host(text: str) -> HostSlots:
    """Parse `[USER@]HOST[:SLOTS]`; an IPv6 address stands in brackets.

    >>> parse_host("host1:8"), parse_host("ada@[fd00::1]").address
    (HostSlots(target='host1', slots=8), 'fd00::1')
    """
    match = _HOST.fullmatch(text)
    target = "" if match is None else (match["user"] or "") + match["name"].strip("[]")
    # One that begins with a dash would be an option of ssh.
    if match is None or target.startswith("-") or match["slots"] == "0":
        raise ConfigError(f"'{text}' is not a host: write HOST or HOST:WORKERS.")
    return HostSlots(target, int(match["slots"] or 0))


def parse_hosts(texts: Iterable[str]) -> tuple[HostSlots, ...]:
    """Parse several hosts; a host that is named twice is an error."""
    hosts = tuple(parse_host(text.strip()) for text in texts if text.strip())
    seen: set[str] = set()
    for host in hosts:
        if host.target in seen:
            raise ConfigError(f"Host {host} is listed twice: add up its workers, as {host}:8.")
        seen.add(host.target)
    _check_loopback(hosts)
    return hosts


def _check_loopback(hosts: tuple[HostSlots, ...]) -> None:
    """Refuse `localhost` beside other machines, where it would be another machine."""
    if len(hosts) < 2:
        return
    from torchelastic.transport.addresses import loopback_addresses  # `--help` must be fast

    local = [host for host in hosts if loopback_addresses(host.address)]
    if local and len(local) < len(hosts):
        raise ConfigError(
            f"{local[0]} is a different machine for each host: write the name or address at which "
            "the other hosts reach this machine."
        )


def parse_lines(text: str) -> tuple[HostSlots, ...]:
    """Parse a file or the output of a command: one `HOST[:SLOTS]` per line, `#` for comments."""
    return parse_hosts(line.partition("#")[0] for line in text.splitlines())


def read_hosts(source: str) -> tuple[HostSlots, ...]:
    """Read the hosts from a file, or run a program or shell command that prints them.

    Raises `ConfigError` if it fails; no hosts are an answer, too.
    """
    import subprocess  # slow to import, and `--help` must be fast

    if os.path.isfile(source) and not os.access(source, os.X_OK):
        try:
            return parse_lines(Path(source).read_text(errors="replace"))
        except OSError as error:
            raise ConfigError(f"Cannot read {source}: {error.strerror}.") from None
    with subprocess.Popen(
        source,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it has started holds the pipes, too
            raise ConfigError(
                f"'{source}' did not end within {COMMAND_TIMEOUT:g} s: make it faster."
            ) from None
    if process.returncode != 0:
        last = (errors.strip().splitlines() or ["it printed no error"])[-1]
        raise ConfigError(
            f"'{source}' is not a file, and as a command it failed with exit code "
            f"{process.returncode} ({last}): name a file, or a command that prints one "
            "HOST[:WORKERS] per line."
        )
    return parse_lines(printed)
