"""The messages between agents about the host of their store.

the asking agent           the agent asked
canvass                    ->
                           <-   ballot
reign (from the host)      ->
                           <-   noted
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchelastic.transport.frames import Message, Row, by_kind


@dataclass(frozen=True, slots=True)
class VoteRequest(Message):
    """Asks for a vote (`majority.Candidacy`)."""

    kind = "canvass"
    term: int
    node: str
    generation: int
    binding: bool
    settled: bool
    #: Its agent was started again since that world: the state of its workers is lost.
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Ballot(Message):
    """Answers a request for a vote. A vote carries the voter's rows in the store under its
    lease."""

    kind = "ballot"
    node: str
    granted: bool
    #: The reason for a refusal.
    why: str
    #: The newest term, and the newest world, that this node knows.
    term: int
    generation: int
    #: The address of the host that it follows; empty if it has lost it.
    hosts: list[str]
    lease: str
    seconds: float
    rows: list[Row]
    #: Nodes of its machine that saw the end of their run of the job.
    ended: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HostAnnouncement(Message):
    """Announces the host of the store."""

    kind = "reign"
    term: int
    node: str
    #: The newest world it has.
    generation: int
    addresses: list[str]


@dataclass(frozen=True, slots=True)
class AnnouncementReply(Message):
    """Answers an announcement: the newest term this node knows, and the host it knows."""

    kind = "noted"
    term: int
    hosts: list[str]


QUESTIONS = by_kind(VoteRequest, HostAnnouncement)
BALLOTS, REPLIES = by_kind(Ballot), by_kind(AnnouncementReply)
