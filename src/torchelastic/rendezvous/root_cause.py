"""Find the first failure. Pure, and by causal order: clocks of different machines are not compared.

Failures are listed in the order in which the leader learned of them. That order is right except for
consequences: the peers of a failing worker see their connections break, and may report it before
the worker has died or its node's lease has ended. So each failure is first classified by itself:
can the loss of another worker explain it? A failure that it can explain is never named before one
that it cannot.

    a cause               an exception in the script, a signal, an exit code
    a lost node           no more is known of it; what it reported before is a cause
    exited silently       an exit code alone: a cause, but not beside a node that was lost
    an abort              its own failed check, or NCCL's watchdog giving up on a lost peer
    a connection          of any kind: to a peer, or to some server of the user's
    a wait for others     errors of collectives and stores whose other end is gone; or the worker
                          was in a collective, and shows it: a waiting worker did not fail first
    stopped               by its own agent

Within the last kinds, workers that had entered more collectives waited for those that had entered
fewer. Of several causes the first reported one is named, and the others count as independent: the
same `SyntaxError` on two ranks is not a consequence.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import replace

from torchelastic.events.failure import Failure, says_peer_gone

#: Messages of gloo, NCCL, torch's stores and ours for a lost peer, besides those of
#: `says_peer_gone`; in lower case.
_LOST_PEER = re.compile(
    r"^lost a peer\b"
    r"|connection closed by peer"
    r"|gloo/transport/.*(connection refused|timeout)"
    r"|connectfullmesh failed"
    r"|application timeout caused pair closure"
    r"|timed out waiting \d+ ?ms for"
    r"|nccl operation timed out"
    r"|nccl error"
    r"|collective operation timeout"
    r"|^([\w.]+\.)?dist(backend|network|store)error\b"
)
#: NCCL's messages for a failure of its own device.
_OWN_DEVICE = re.compile(r"ncclunhandledcudaerror|cuda failure|unhandled cuda error")
#: Messages of broken connections of any kind, the exceptions that have them, and those that mean
#: nothing else, whatever they say.
_CONNECTION = re.compile(
    r"connection (reset|refused|aborted|closed)|broken pipe|timed out waiting|socket timeout"
    r"|failed to recv"
)
_CONNECTION_TYPES = re.compile(
    r"^([\w.]+\.)?(runtimeerror|oserror|ioerror|eoferror|timeouterror|timeout|brokenpipeerror"
    r"|connection\w*error)\b"
)
_CONNECTION_ERROR = re.compile(
    r"^([\w.]+\.)?(connection(reset|refused|aborted)?error|brokenpipeerror)\b"
)

_SIGABRT = (-6, 128 + 6)
#: The agent's own stop; a shell or a script's handler turns it into 143.
_STOPPED = (-15, 128 + 15)


class _FailureKind(enum.IntEnum):
    """The kind of a failure, the likeliest cause first."""

    CAUSE = 0
    LOST_NODE = 1
    SILENT_BESIDE_A_LOST_NODE = 2
    ABORT_AMONG_LOST_PEERS = 3
    CONNECTION = 4
    LOST_PEER = 5
    STOPPED = 6


def is_consequence(failure: Failure) -> bool:
    """Return whether the loss of another worker or node can explain the failure."""
    return _kind_of(failure, among_lost=True, node_lost=False) not in (
        _FailureKind.CAUSE,
        _FailureKind.LOST_NODE,
    )


def waited_for_others(failure: Failure) -> bool:
    """Return whether it only reports that another worker is gone."""
    return _kind_of(failure, among_lost=True, node_lost=False) is _FailureKind.LOST_PEER


def lost_connection(failure: Failure) -> bool:
    """Return whether it reports a broken connection, to a peer or to a server of the user's."""
    kind = _kind_of(failure, among_lost=False, node_lost=False)
    return kind in (_FailureKind.CONNECTION, _FailureKind.LOST_PEER)


def pick(
    failures: Sequence[Failure], lost: Sequence[Failure] = ()
) -> tuple[Failure | None, tuple[Failure, ...]]:
    """The first failure and, in order, the others of its generation. Failures that the loss of a
    peer does not explain are marked `by_itself`; the rest are consequences of the first.

    `lost` are the nodes that are gone (`failure.node_failure`).
    """
    every = (*failures, *lost)
    if not every:
        return None, ()
    candidates = [item for item in every if item.generation == every[0].generation]
    kinds = []
    among_lost = bool(lost)
    for item in candidates:
        kinds.append(_kind_of(item, among_lost=among_lost, node_lost=bool(lost)))
        among_lost = among_lost or kinds[-1] in (_FailureKind.CONNECTION, _FailureKind.LOST_PEER)
    first = _first(candidates, kinds)
    cause = candidates[first]
    others = [
        replace(item, by_itself=kind is _FailureKind.CAUSE and _is_by_itself(item, cause))
        for place, (item, kind) in enumerate(zip(candidates, kinds, strict=True))
        if place != first
    ]
    return cause, tuple(others)


def _is_by_itself(failure: Failure, cause: Failure) -> bool:
    """Return whether a failure that looks like a cause is independent of the first.

    A worker that exits or aborts silently may have lost a peer, and been ended by its script or by
    NCCL's watchdog. It is independent only if the first one ended in the same way.
    """
    killed = failure.exitcode < 0 and failure.exitcode not in _SIGABRT
    return failure.told or killed or failure.signature() == cause.signature()


def _first(candidates: Sequence[Failure], kinds: Sequence[_FailureKind]) -> int:
    """The index of the likeliest cause; of several, the first one reported."""
    rivals = [place for place, kind in enumerate(kinds) if kind is min(kinds)]
    entered = [candidates[place].entered for place in rivals]
    if min(kinds) >= _FailureKind.CONNECTION and min(entered) >= 0:
        return rivals[entered.index(min(entered))]
    return rivals[0]


def _kind_of(failure: Failure, *, among_lost: bool, node_lost: bool) -> _FailureKind:
    if failure.is_node:
        return _FailureKind.LOST_NODE
    if failure.stopped or (failure.exitcode in _STOPPED and not failure.told):
        return _FailureKind.STOPPED
    said = _said(failure)
    lost = (line for line in said if says_peer_gone(line) or _LOST_PEER.search(line))
    if not all(map(_OWN_DEVICE.search, lost)):
        return _FailureKind.LOST_PEER
    if any(map(_is_broken_connection, said)):
        return _FailureKind.CONNECTION
    if failure.exitcode in _SIGABRT and not failure.told and among_lost:
        return _FailureKind.ABORT_AMONG_LOST_PEERS
    if failure.exitcode > 0:
        if failure.waited:
            return _FailureKind.LOST_PEER
        if node_lost and not failure.told and not failure.alive:
            return _FailureKind.SILENT_BESIDE_A_LOST_NODE
    return _FailureKind.CAUSE


def _is_broken_connection(line: str) -> bool:
    if _CONNECTION_ERROR.search(line):
        return True
    return bool(_CONNECTION.search(line) and _CONNECTION_TYPES.search(line))


def _said(failure: Failure) -> list[str]:
    """The message, and the chained errors: the lines of a traceback that are not indented.

    Indented lines are source code, which may mention connections although none is broken.
    """
    chain = [line for line in failure.traceback.splitlines() if not line.startswith(" ")]
    return [text.lower() for text in (failure.message, *chain)]
