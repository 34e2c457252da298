"""What agents say to each other about who hosts their store.

whoever asks                    the agent asked
canvass                    ->
                           <-   ballot
reign (whoever is host)    ->
                           <-   noted
"""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.transport.frames import Message, Row, by_kind


@dataclass(frozen=True, slots=True)
class Canvass(Message):
    """Asks for a vote (`succession.Candidacy`)."""

    kind = "canvass"
    term: int
    node: str
    generation: int
    binding: bool
    settled: bool


@dataclass(frozen=True, slots=True)
class Ballot(Message):
    """Answers a canvass. A vote brings along what the voter had in the store under its lease."""

    kind = "ballot"
    node: str
    granted: bool
    #: Why not.
    why: str
    #: The newest term this node knows of, and the newest world.
    term: int
    generation: int
    #: Where the host is that it follows; none if it has lost it.
    hosts: list[str]
    lease: str
    seconds: float
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Reign(Message):
    """Says who hosts the store."""

    kind = "reign"
    term: int
    node: str
    #: The newest world it holds.
    generation: int
    addresses: list[str]


@dataclass(frozen=True, slots=True)
class Noted(Message):
    """Answers a reign: the newest term this node knows of, and where it knows its host."""

    kind = "noted"
    term: int
    hosts: list[str]


QUESTIONS = by_kind(Canvass, Reign)
REPLIES = by_kind(Ballot, Noted)
