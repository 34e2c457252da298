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
import dataclasses
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from torchelastic.errors import RendezvousRefused
from torchelastic.rendezvous.majority import FIRST_VOTE
from torchelastic.rendezvous.witness.witness_client import WitnessClient, WitnessSilent
from torchelastic.rendezvous.witness.witness_storage import Json

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
        """Whether the run that this node started was given up by another node."""
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
