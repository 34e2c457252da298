"""The witness of one job: the run of the job, and the holders of its votes.

    <url>/<job>/incarnation-<k>      {token}, made by the starting node; {token, closed} at the end
    <url>/<job>/<k>/first            {node, term, nonce}: the starting node, before its first world;
                                     or {abandoned}: the run was given up before it had one
    <url>/<job>/<k>/after-<g>        {node, term, nonce}: has the vote in the electorate of world g

A node claims a vote by creating its key, which storage allows only one node to do, and never
returns it. A missing key proves nothing (NFS caches absence for a while): only what was created or
read counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torchelastic
from torchelastic.errors import ConfigError, RendezvousRefused
from torchelastic.rendezvous.majority import FIRST_VOTE
from torchelastic.rendezvous.witness.witness_storage import Json
from torchelastic.system import die_with_owner

MODULE = "torchelastic.rendezvous.witness.witness_storage"
#: Seconds to wait for the storage.
ANSWER_TIMEOUT = 5.0
#: Seconds between two checks whether a killed process has ended.
POLL_INTERVAL = 0.01


# --- the agent's end of the process that accesses the storage ------------------------------------


class WitnessSilent(Exception):
    """The storage did not answer, or not correctly: nothing is known."""


class WitnessClient:
    """Sends one request at a time. The process starts with the first one, and again when it is
    stuck."""

    def __init__(self, url: str, on_child: Callable[[int], None] = lambda pid: None) -> None:
        """`on_child` is called with every process that is started, at once."""
        self._url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
        self._on_child = on_child
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        #: Killed processes that may be stuck in the kernel.
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, do: str, key: str, value: Json | None = None) -> Json:
        """The storage's answer; raises `WitnessSilent`, or `ConfigError` for an unusable URL."""
        try:
            found = await asyncio.wait_for(self._ask(do, key, value), ANSWER_TIMEOUT)
        except asyncio.TimeoutError:
            raise WitnessSilent(f"no answer within {ANSWER_TIMEOUT:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise WitnessSilent(f"its client process exited: {error!r}") from error
        if "refused" in found:
            raise ConfigError(str(found["refused"]))
        if "error" in found:
            raise WitnessSilent(str(found["error"]))
        return found

    async def _ask(self, do: str, key: str, value: Json | None) -> Json:
        async with self._turn:
            try:
                if self._writer is None:
                    await self._start()
                assert self._reader is not None
                assert self._writer is not None
                request = {"do": do, "key": key, "value": value}
                self._writer.write(json.dumps(request).encode() + b"\n")
                line = await self._reader.readline()
                if not line:
                    raise EOFError("no output")
                found: dict[str, Any] = json.loads(line)
                return found
            except BaseException:  # a late answer would be taken for that of the next request
                self._drop()
                raise

    async def _start(self) -> None:
        while any(process.poll() is None for process in self._stuck):
            await asyncio.sleep(POLL_INTERVAL)  # do not start one more for each request
        self._stuck.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            owned = [sys.executable, die_with_owner.__file__, str(os.getpid())]
            asks = [sys.executable, "-m", MODULE, str(theirs.fileno()), self._url]
            self._process = subprocess.Popen(
                [*owned, *asks],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Not the working directory: `-m` would search a user's files.
                cwd=Path(torchelastic.__file__).parents[1],
            )
        self._on_child(self._process.pid)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        if self._process is not None:
            self._process.kill()
            self._stuck.append(self._process)
        self._process = self._reader = self._writer = None

    async def close(self) -> None:
        """Stop the process; a stuck one is left to the kernel."""
        self._drop()
        for process in self._stuck:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 1.0)


logger = logging.getLogger(__name__)

_INCARNATION = re.compile(r"incarnation-(\d+)")


@dataclass(frozen=True)
class Holder:
    """The node that has claimed a vote, and its term."""

    node: str
    term: int
    nonce: str

    @classmethod
    def read(cls, value: Json | None) -> Holder:
        """Read a holder; an empty one if it is unreadable."""
        try:
            return cls(**value) if value is not None else cls("", 0, "")
        except TypeError:
            return cls("", 0, "")


class Witness:
    """A node's view of the witness. Raises `WitnessSilent` if storage does not answer."""

    def __init__(self, asking: WitnessClient, url: str, job: str, node: str) -> None:
        self.url = url
        self._asking = asking
        self._job = quote(job, safe="")
        self._node = node
        self._nonce = secrets.token_hex(8)
        #: The run of the job, and the random token that all its nodes read there; empty: unknown.
        self._incarnation = -1
        self.token = ""
        #: The token of the run that this node starts, and its number, if it does.
        self._own_token = secrets.token_hex(8)
        self._founded = -1
        #: The token of the run that this node's last agent was in; empty: it is a new node.
        self.expected = ""
        self._is_tested = False
        self._holders: dict[str, Holder] = {}

    # The run of the job

    async def found(self) -> str:
        """Start the job, unless an earlier run is not closed and has had a world; return the
        obstacle, or ""."""
        newest, marker = await self._newest()
        is_open = newest >= 0 and not marker.get("closed")
        if self.is_abandoned or (marker.get("token") == self._own_token and not is_open):
            self._own_token = secrets.token_hex(8)
            self._holders.pop(FIRST_VOTE, None)
        if is_open and marker.get("token") == self._own_token:
            newest -= 1  # started by this node before; the answer was lost
        elif is_open and not await self._abandon(newest, marker):
            return (
                "an earlier run of this job was not closed at the witness: waiting for its "
                f"nodes (if none is left, remove {self._path(newest)})"
            )
        ours = {"token": self._own_token, "node": self._node}
        made = await self._asking.ask("create", self._marker(newest + 1), ours)
        if made.get("value") != ours:
            return "another node is starting the job"
        self._incarnation = self._founded = newest + 1
        self.token, self.expected = self._own_token, ""
        await self._test()
        return ""

    async def _abandon(self, run: int, marker: Json) -> bool:
        """Close a run that never had a world; return whether it had none, and will have none.

        Its starting node claims its first vote before its first world, so nobody needs to wait for
        a run whose first vote is refused to it. A node's own last run had no world if the node,
        which keeps each world before it shows it, has none.
        """
        if marker.get("node") != self._node or marker.get("token") != self.expected:
            key = f"{self._job}/{run}/{FIRST_VOTE}"
            made = await self._asking.ask("create", key, {"abandoned": self._node})
            if "abandoned" not in (made.get("value") or {}):
                return False
        await self._close_run(run, str(marker.get("token")))
        return True

    @property
    def is_abandoned(self) -> bool:
        """Return whether the run that this node started was given up by another node."""
        return FIRST_VOTE in self.refused(0)

    async def confirm(self) -> str:
        """The token of the running job; tests the storage first."""
        if self._incarnation < 0:
            newest, _ = await self._newest()
            if newest < 0:
                raise WitnessSilent("it does not know the job")
            self._incarnation = newest
        marker = await self._read_marker(self._incarnation)
        if not marker.get("token") or marker.get("closed"):
            self._incarnation = -1
            raise WitnessSilent("it does not know the job")
        if self.expected and marker["token"] != self.expected:
            self._incarnation = -1
            raise WitnessSilent("it knows another run of the job")
        await self._test()
        self.token = str(marker["token"])
        return self.token

    async def close_job(self) -> None:
        """Close the job: no node can continue this run, and its votes are removed.

        In this order, because a claim is checked against the marker afterwards.
        """
        if self.token:
            await self._close_run(self._incarnation, self.token)

    async def _close_run(self, run: int, token: str) -> None:
        await self._asking.ask("replace", self._marker(run), {"token": token, "closed": True})
        await self._asking.ask("remove", f"{self._job}/{run}")

    async def close(self) -> None:
        await self._asking.close()

    async def _newest(self) -> tuple[int, Json]:
        names = (await self._asking.ask("names", self._job))["names"]
        numbers = [int(found[1]) for name in names if (found := _INCARNATION.fullmatch(name))]
        newest = max(numbers, default=-1)
        return newest, await self._read_marker(newest) if newest >= 0 else {}

    async def _read_marker(self, incarnation: int) -> Json:
        return (await self._asking.ask("read", self._marker(incarnation))).get("value") or {}

    def _marker(self, incarnation: int) -> str:
        return f"{self._job}/incarnation-{incarnation}"

    def _path(self, incarnation: int) -> str:
        return f"{self.url.rstrip('/')}/{self._marker(incarnation)}"

    async def _test(self) -> None:
        """Raise an error for storage that creates a key twice: it would give one vote to two
        nodes."""
        if self._is_tested:
            return
        key = f"{self._job}/{self._incarnation}/test-{self._node}-{self._nonce}"
        made = [await self._asking.ask("create", key, {"attempt": number}) for number in (0, 1)]
        await self._asking.ask("remove", key)
        if not made[0]["created"] or made[1]["created"] or made[1].get("value") != {"attempt": 0}:
            raise RendezvousRefused(
                f"Cannot use --witness {self.url}: it lets two clients create the same key. Use "
                "a directory on shared storage, or an object store with conditional writes."
            )
        self._is_tested = True

    # Its votes

    async def claim(self, vote: str, term: int) -> bool:
        """Claim a vote for this node's term; True if it is this node's, forever."""
        if vote not in self._holders:
            run = self._founded if vote == FIRST_VOTE else await self._find_run()
            ours = self._ours(vote, term)
            key = f"{self._job}/{run}/{vote}"
            made = await self._asking.ask("create", key, dataclasses.asdict(ours))
            if "value" not in made:
                raise WitnessSilent("it does not return what was written")
            holder = Holder.read(made["value"])
            if holder == ours and not await self._is_open(run):
                holder = Holder("", 0, "")
            self._holders[vote] = holder
            if holder == ours:
                logger.info("the witness gave this node its vote %s in term %d", vote, term)
        return vote in self.votes(term)

    async def _find_run(self) -> int:
        """The run of this node; a restarted node looks for that of its last agent, which has its
        votes."""
        if self._incarnation < 0:
            await self.confirm()
        return self._incarnation

    async def _is_open(self, run: int) -> bool:
        """Return whether a run is not closed. The votes of a closed one are gone, and could be
        claimed again."""
        marker = await self._read_marker(run)
        return marker.get("token") == self.token and not marker.get("closed")

    async def look(self, vote: str) -> None:
        """Look up the holder of a vote, before other nodes are asked for theirs."""
        if vote not in self._holders:
            run = await self._find_run()
            found = await self._asking.ask("read", f"{self._job}/{run}/{vote}")
            if "value" in found:
                holder = Holder.read(found["value"])
                if (holder.node, holder.nonce) != (self._node, self._nonce):
                    self._holders[vote] = holder

    def votes(self, term: int) -> frozenset[str]:
        """The votes that this node has in a term."""
        held = self._holders.items()
        return frozenset(vote for vote, holder in held if holder == self._ours(vote, term))

    def _ours(self, vote: str, term: int) -> Holder:
        """This node as the holder of a vote; the first one counts in every term."""
        return Holder(self._node, 0 if vote == FIRST_VOTE else term, self._nonce)

    def refused(self, term: int) -> Mapping[str, str]:
        """The votes that this node can no longer get in a term, and their holders."""
        ours = self.votes(term)
        return {vote: held.node for vote, held in self._holders.items() if vote not in ours}


#: Seconds between two checks, and between two while it does not answer.
CHECK_INTERVAL, RETRY_INTERVAL = 60.0, 5.0


class WitnessWatch:
    """Reads the job's token from the witness. Reports once that it is unreachable, and when it is
    back."""

    def __init__(self, witness: Witness, say: Callable[[str], None]) -> None:
        self._witness = witness
        self._say = say
        self._is_missed = False

    async def look(self) -> str:
        """Read the token; empty if it cannot be read. Raises `RendezvousRefused` for unusable
        storage."""
        try:
            token = await self._witness.confirm()
        except WitnessSilent as error:
            if not self._is_missed:
                self._say(
                    f"the witness at {self._witness.url} does not respond: {error}. Training "
                    "continues; worlds that start meanwhile have no witness"
                )
            self._is_missed = True
            return ""
        if self._is_missed:
            self._say(f"the witness at {self._witness.url} responds again")
        self._is_missed = False
        return token

    async def run(self, note: Callable[[str], None]) -> None:
        """Check periodically; `note` receives the token each time."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL if self._is_missed else CHECK_INTERVAL)
            note(await self.look())
