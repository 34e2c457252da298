"""The file in which a node keeps its vote, so that the next agent on its machine is the same voter:
its id, the term it has voted in and for whom, and the newest world.

    $XDG_RUNTIME_DIR/torchelastic/<job>-<hash>/<node>/voter       beside the node's `agent.json`

The agent that has the file locked is the node; an agent that finds no unlocked file is a new node.
A file can be removed at any time: its node then never comes back, and the next agent is a new node
without a vote.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.config import ETCD_BACKENDS, LaunchConfig, parse_endpoint
from torchelastic.errors import ConfigError, RendezvousError, VoteOutdated
from torchelastic.events import job_registry
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Returns
from torchelastic.rendezvous.embedded.election import Poll
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.state_file import Entry, StateFile, sync_directory
from torchelastic.rendezvous.job_settings import JobSettings
from torchelastic.rendezvous.majority import Elector

log = logging.getLogger(__name__)

FILE = "voter"
#: The files with a machine's id; the second one changes at boot.
_MACHINE_IDS = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")
#: Seconds of a write after which a message reports a slow disk.
SLOW_WRITE = 2.0


@dataclass(frozen=True)
class Voter:
    """The state of a voter that must survive its agent."""

    term: int = 0
    chosen: str = ""
    holding: FailoverState = field(default_factory=FailoverState)
    #: The token of the job's run at the witness; empty without one.
    token: str = ""

    @property
    def generation(self) -> int:
        return self.holding.roll.generation

    def address_of(self, node: str) -> tuple[str, int]:
        """The last known address of a node; empty, with port 0, if it is not known."""
        address = self.holding.addresses.get(node)
        return parse_endpoint(address) if address else ("", 0)

    def is_as(self, other: Voter | None) -> bool:
        """Return whether nothing relevant differs; another phase of the same world is not
        relevant."""
        if other is None or self.holding.rows.keys() != other.holding.rows.keys():
            return False
        return _without_rows(self) == _without_rows(other)

    def to_json(self) -> dict[str, Any]:
        roll = self.holding.roll
        return {
            "term": self.term,
            "chosen": self.chosen,
            "generation": roll.generation,
            "nodes": sorted(roll.latest.nodes),
            "host": roll.latest.host,
            "witness": bool(roll.latest.witness),
            "roll": majority.to_json(roll),
            "order": self.holding.order,
            "addresses": self.holding.addresses,
            "rows": self.holding.rows,
            "token": self.token,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Voter:
        roll = majority.from_json(
            data["roll"],
            data["generation"],
            data["nodes"],
            data["host"],
            witness=data["witness"],
        )
        held = FailoverState(roll, tuple(data["order"]), data["addresses"], data["rows"])
        return cls(data["term"], data["chosen"], held, data["token"])


def _without_rows(voter: Voter) -> tuple[object, ...]:
    held = voter.holding
    return voter.term, voter.chosen, voter.token, held.roll, held.order, held.addresses


def why_void(
    voter: Voter,
    said: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    gone: Collection[str] = (),
    ended: Collection[str] = (),
    is_late: bool = False,
) -> str:
    """Return why an agent must not, or need not, continue as this voter; empty if it does. Pure.

    `said` and `ours` are the machine and the job, in the file and here; `gone` are nodes that never
    come back, `ended` those that saw the end of their run of the job.
    """
    differing = [key for key in ours if said.get(key) != ours[key]]
    if differing:
        return f"it has another {differing[0]}"
    if is_late:
        return "the other nodes stopped waiting for this node (--wait-for-nodes)"
    voters = majority.voters(voter.holding.roll)
    if voters & {*ended}:
        return "its run of the job has ended"
    if not majority.agreed(voter.holding.roll.electorates, voters - {*gone}):
        return "too many nodes of its world are gone for good"
    return ""


class VoterFile:
    """The file of one node, and the node's id; written by threads, used by one loop."""

    def __init__(
        self,
        path: Path,
        node: str,
        identity: Mapping[str, Any],
        *,
        ended: Collection[str] = (),
        is_off: bool = False,
    ) -> None:
        """`ended`: nodes of this machine that saw the end of their run of the job. `is_off`: never
        write anything."""
        self.path = path
        self.node = node
        self.ended = frozenset(ended)
        #: The state that this node's last agent left; None: it is a new node.
        self.resumed: Voter | None = None
        self._identity = {**identity, "node": node}
        self._file = StateFile(str(path))
        self._begun = False
        self._lock = threading.Lock()
        self._wanted: Voter | None = None
        self._written: Voter | None = None
        self._is_off = is_off

    @property
    def sentence(self) -> str:
        """The sentence for users about the resumed vote."""
        return (
            f"this node resumes its vote in generation {self.generation} from {self.path}; to "
            "join as a new node, remove that file first"
        )

    @property
    def generation(self) -> int:
        """The newest world of the last agent, whose workers are gone; -1: none."""
        return -1 if self.resumed is None else self.resumed.generation

    async def keep(self, elector: Elector, holding: FailoverState, token: str = "") -> None:
        """Wait until this is on disk, so that others may learn of it; for a node that leaves, until
        the file is removed.

        If it cannot be written, a warning is logged and the file is removed. Term 0 is that of a
        store without failover.
        """
        voter = None if elector.leaving else Voter(elector.term, elector.chosen, holding, token)
        if not elector.term or self._is_off or (voter is not None and voter.is_as(self._written)):
            return
        self._wanted = voter
        try:
            await asyncio.to_thread(self._write)
        except RuntimeError as error:
            # No thread can be started (pids.max). The vote counts more than a few milliseconds.
            log.debug("writing %s in the loop: %s", self.path, error)
            self._write()

    def _write(self) -> None:
        with self._lock:
            wanted, began = self._wanted, time.monotonic()
            if self._is_off or (wanted is not None and wanted.is_as(self._written)):
                return  # another thread wrote this, or something later
            try:
                self._put(wanted)
            except (OSError, ConfigError) as error:
                log.warning(
                    "Cannot write %s (%s): this node's vote is lost if its agent restarts. The "
                    "next agent then waits for the nodes that still run this job, and joins "
                    "them as a new node.",
                    self.path,
                    error,
                )
                self._remove()
            self._written = wanted
            if time.monotonic() - began > SLOW_WRITE:
                took = time.monotonic() - began
                log.warning("Writing %s took %.1f s; other nodes had to wait.", self.path, took)

    def _put(self, voter: Voter | None) -> None:
        if voter is None:
            self._remove()
            return
        entry = ["voter", self._identity, voter.to_json()]
        if self._begun and not self._file.is_long:
            self._file.append(entry, lasting=True)
        else:
            self._file.rewrite([entry])
            self._begun = True

    def check(self, poll: Poll, returns: Returns, *, waited: bool) -> None:
        """End this node, to be restarted as a new one, if its resumed vote is outdated."""
        why = poll.why_outdated(returns, waited=waited) if self.resumed is not None else ""
        if why:
            self.discard()
            raise VoteOutdated(
                f"This node resumed generation {self.generation} of job "
                f"'{self._identity['job']}', but {why}; it joins as a new node."
            )

    def discard(self) -> None:
        """Remove the file: the job is closed, or it belongs to another job."""
        with self._lock:
            if not self._is_off:
                self._remove()

    def _remove(self) -> None:
        self._is_off = True
        try:
            for path in (self.path, self.path.with_name(f"{FILE}.new")):
                path.unlink(missing_ok=True)
            if self.path.parent.exists():
                sync_directory(str(self.path))
        except OSError as error:
            # The next agent would resume an older vote than this node's last, and could vote twice.
            raise RendezvousError(
                f"Cannot write or remove {self.path} ({error.strerror}): remove it before you "
                "start a node of this job here again."
            ) from error
        finally:
            self._file.close()

    def close(self) -> None:
        """Leave the file to the next agent."""
        with self._lock:
            self._is_off = True
            self._file.close()

    def resume(self, *, gone: Collection[str] = (), is_late: bool = False) -> bool:
        """Lock the file for this process and continue from it; False if it is in use or void."""
        try:
            kept = _last(self._file.read())
        except ConfigError as error:
            log.debug("not resumed: %s", error)  # another agent has it, or it is damaged
            kept = None
        if kept is None:
            self._file.close()
            return False
        voter, said = kept
        why = why_void(voter, said, self._identity, gone=gone, ended=self.ended, is_late=is_late)
        if not why:
            self.resumed = self._written = voter
            return True
        log.debug("%s is void: %s", self.path, why)
        if said.get("machine") == self._identity["machine"]:
            self.discard()
        self.close()
        return False


def _last(entries: Sequence[Entry]) -> tuple[Voter, Mapping[str, Any]] | None:
    """The last entry of a file; None if it is not ours."""
    match entries[-1:]:
        case [["voter", dict(said), dict(data)]]:
            try:
                return Voter.from_json(data), said
            except (KeyError, TypeError, ValueError):
                return None
    return None


def claim(config: LaunchConfig, command: Sequence[str]) -> VoterFile:
    """The file of a node of this job that ran here and has no agent now (oldest first), or of a new
    node; not written if the job never votes."""
    node = secrets.token_hex(6)
    if config.max_nodes == 1 or config.rdzv_backend in ETCD_BACKENDS:
        return VoterFile(Path(os.devnull), node, {}, is_off=True)
    ours = {
        "machine": _machine(),
        "job": config.run_id,
        "command": [*command],
        "agreement": JobSettings.from_config(config).digest,
    }
    if config.incarnation:
        ours["incarnation"] = config.incarnation
    agents = job_registry.agents_of(config.run_id)
    saw_end = [one.node for one in agents if one.closed]
    past = sorted((one for one in agents if not one.alive), key=lambda one: one.started)
    gone = [one.node for one in past if not _path(config, one.node).exists()]
    for agent in past:
        file = VoterFile(_path(config, agent.node), agent.node, ours, ended=saw_end)
        idle = time.time() - agent.last_seen
        if file.resume(gone=gone, is_late=idle > (config.wait_for_nodes or math.inf)):
            return file
    return VoterFile(_path(config, node), node, ours, ended=saw_end)


def _path(config: LaunchConfig, node: str) -> Path:
    return job_registry.directory_for(config.run_id, node) / FILE


def _machine() -> str:
    """The id of this machine: the files may be on shared storage."""
    for path in map(Path, _MACHINE_IDS):
        if path.exists() and (found := path.read_text().strip()):
            return f"{found} {socket.gethostname()}"
    return f"{os.uname().version} {socket.gethostname()}"
