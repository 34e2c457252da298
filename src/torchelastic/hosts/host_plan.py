"""Decide which hosts to start and which to ask to leave. Pure.

All hosts are called at once. The first of the list that answers founds the job; the others wait
until its agent runs, and find the job at hosts that run already. There is one founder at a time,
however slow it is: a second one would found a second job. A host that fails is called again after a
pause that doubles.

    absent ──Connect──▶ calling ──it answers──▶ ready ──Start──▶ starting ──▶ running
    any of these ──ends──▶ failed (pause, then absent)     ──Leave──▶ leaving ──▶ absent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchelastic.backoff import pause
from torchelastic.hosts.host_list import HostSlots

#: Seconds before a host that failed is started again, and at most; the pause doubles.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
#: A host that ran this long has not kept failing.
STEADY = 120.0
#: Seconds that a host has to answer before the next one founds the job.
ANSWER_TIMEOUT = 15.0
#: Running hosts that a new one is told about.
ENDPOINTS = 3

Status = Literal["calling", "ready", "starting", "running", "leaving", "failed"]
#: Those of a host that is to take part in the job.
_ACTIVE = ("calling", "ready", "starting", "running")


@dataclass(frozen=True)
class HostState:
    """One host, as the launcher knows it. All times are monotonic."""

    status: Status
    #: When it got this status.
    since: float
    #: How often it failed in a row.
    failures: int = 0
    #: When it may be started again.
    retry_at: float = 0.0
    #: Its agent ended with a user error before it was in the job.
    refused: bool = False


@dataclass(frozen=True)
class Connect:
    """Call a host: start the program there that will start the agent."""

    host: HostSlots


@dataclass(frozen=True)
class StartAgent:
    """Start an agent on a host that has answered; it looks for the job at these hosts."""

    host: HostSlots
    endpoints: tuple[str, ...]


@dataclass(frozen=True)
class LeaveHost:
    """Ask the agent on a host to leave: the host is not in the list any more."""

    target: str


Command = Connect | StartAgent | LeaveHost


def plan(
    wanted: Sequence[HostSlots],
    states: Mapping[str, HostState],
    met_at: Sequence[str],
    now: float,
    *,
    may_run: bool = False,
) -> list[Command]:
    """Return what to do now. `met_at`: the targets that were last known to run, oldest first.

    `may_run`: an earlier launcher may have started the job, so no host founds it before the others
    have had time to answer.
    """
    targets = {host.target for host in wanted}
    commands: list[Command] = [
        LeaveHost(target)
        for target, state in states.items()
        if state.status in _ACTIVE and target not in targets
    ]
    for host in wanted:
        state = states.get(host.target)
        if state is None or (state.status == "failed" and now >= state.retry_at):
            commands.append(Connect(host))
    ready = [host for host in wanted if _status(host, states) == "ready"]
    if endpoints := _endpoints(wanted, met_at):
        commands += [StartAgent(host, endpoints) for host in ready]
    elif ready and not _must_wait(ready[0], wanted, states, now, may_run=may_run):
        commands.append(StartAgent(ready[0], (ready[0].address,)))
    return commands


def _must_wait(
    founder: HostSlots,
    wanted: Sequence[HostSlots],
    states: Mapping[str, HostState],
    now: float,
    *,
    may_run: bool,
) -> bool:
    """Return whether this host may not found the job yet."""
    before = wanted if may_run else wanted[: wanted.index(founder)]
    return any(state.status == "starting" for state in states.values()) or any(
        _status(host, states) == "calling" and now - states[host.target].since < ANSWER_TIMEOUT
        for host in before
    )


def _status(host: HostSlots, states: Mapping[str, HostState]) -> Status | None:
    state = states.get(host.target)
    return state.status if state is not None else None


def _endpoints(wanted: Sequence[HostSlots], met_at: Sequence[str]) -> tuple[str, ...]:
    """The addresses where the job is to be found: hosts that ran last and may run again."""
    known = {host.target: host.address for host in wanted}
    return tuple(known[target] for target in met_at if target in known)[:ENDPOINTS]


def failed(state: HostState, now: float, *, refused: bool = False) -> HostState:
    """Return the state of a host whose agent ended, or that could not be reached."""
    steady = state.status == "running" and now - state.since > STEADY
    failures = 1 if steady else state.failures + 1
    retry_at = now + pause(failures, FIRST_PAUSE, LONGEST_PAUSE)
    return HostState("failed", now, failures, retry_at, refused)


def all_refused(wanted: Sequence[HostSlots], states: Mapping[str, HostState]) -> bool:
    """Return whether every host has failed by an error that no other start can fix."""
    known = [states.get(host.target) for host in wanted]
    return bool(known) and all(state is not None and state.refused for state in known)
