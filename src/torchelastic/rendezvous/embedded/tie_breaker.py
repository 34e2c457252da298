"""The witness for a node without a host: its votes, and permission to start the job."""

from __future__ import annotations

import logging
from dataclasses import replace

from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Returns
from torchelastic.rendezvous.embedded.election import Poll, WitnessView
from torchelastic.rendezvous.majority import Elector
from torchelastic.rendezvous.witness.vote_keys import Witness, WitnessSilent

logger = logging.getLogger(__name__)


class TieBreaker:
    """The tie breaker of one node; without a witness it breaks no tie and lets every job start."""

    def __init__(self, witness: Witness | None, node: str, token: str = "") -> None:
        """`token` identifies the run of the job that the node's last agent was in."""
        self._witness = witness
        if witness is not None:
            witness.expected = token
        self._node = node
        #: Why the witness cannot help, for users.
        self._obstacle = ""
        #: The term in which a claim for a vote got no answer.
        self._unclear = 0

    @property
    def token(self) -> str:
        """The token of this node's run of the job, as read from the witness."""
        return "" if self._witness is None else self._witness.token or self._witness.expected

    def view(self, term: int) -> WitnessView:
        """The known votes of the witness in a term."""
        if self._witness is None:
            return WitnessView()
        refused = self._witness.refused(term).keys()
        return WitnessView(self._witness.votes(term), refused, self._obstacle)

    def next_term(self, elector: Elector, heard: int = 0) -> int:
        """The term in which to ask for votes: the last one again while it is unknown whether the
        witness's vote in it is ours, because that vote would not count in another term."""
        is_unclear = self._unclear == elector.term and elector.chosen == self._node
        return self._unclear if is_unclear else majority.next_term(elector, heard)

    async def begins_job(self) -> bool:
        """Return whether this node may start the job: not while the witness knows an earlier
        run."""
        if self._witness is None:
            return True
        try:
            self._obstacle = await self._witness.found()
        except WitnessSilent as error:
            self._note(error)
        return not self._obstacle

    async def may_win(self, poll: Poll, returns: Returns, a_lease_later: bool) -> bool:
        """Return whether a node would be elected, if necessary with the witness's votes.

        If the node is not in the world, these count only after a lease's time: others may still
        step in it.
        """
        missing = poll.to_claim(returns)
        if not missing:
            self._obstacle = ""
            return missing is not None
        if self._witness is None or not (poll.is_in_world or a_lease_later):
            return False
        try:
            for vote in missing:
                await self._witness.look(vote)
        except WitnessSilent as error:
            self._note(error)
            return False
        self._obstacle = ""
        return not self._witness.refused(self.next_term(poll.elector)).keys() & set(missing)

    async def wins(self, poll: Poll, returns: Returns, term: int) -> bool:
        """Return whether the votes of the nodes, and of the witness if some are missing, elect a
        node."""
        if poll.elector.term != term:
            return False
        missing = replace(poll, witness=self.view(term)).to_claim(returns)
        for vote in missing or ():
            assert self._witness is not None
            try:
                is_ours = await self._witness.claim(vote, term)
            except WitnessSilent as error:
                self._note(error)
                self._unclear = term
                return False
            if not is_ours:
                return False
        return missing is not None and (poll.has_world or await self.begins_job())

    @property
    def is_abandoned(self) -> bool:
        """Return whether another node has given up the run of the job that this node started."""
        return self._witness is not None and self._witness.is_abandoned

    def became_host(self) -> None:
        """Note that the node is host: it never asks for votes in that term again."""
        self._unclear = 0

    def _note(self, error: WitnessSilent) -> None:
        assert self._witness is not None
        self._obstacle = f"waiting for the witness at {self._witness.url}: {error}"

    async def close(self, *, ended: bool) -> None:
        if self._witness is None:
            return
        if ended:
            try:
                await self._witness.close_job()
            except WitnessSilent as error:
                logger.warning("Could not close the job at the witness: %s", error)
        await self._witness.close()
