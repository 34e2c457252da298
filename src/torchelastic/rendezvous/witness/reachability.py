"""Check regularly whether the witness can be reached, long before it has to decide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchelastic.rendezvous.witness.vote_keys import Witness
from torchelastic.rendezvous.witness.witness_client import WitnessSilent

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
