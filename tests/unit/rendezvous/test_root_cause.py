from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.events.failure import Failure, node_failure
from torchelastic.rendezvous.root_cause import is_consequence, pick, waited_for_others


def failure(
    message: str = "", exitcode: int = 1, *, traceback: str = "", generation: int = 3, **more
) -> Failure:
    return Failure(
        generation=generation,
        node="node-a",
        rank=0,
        local_rank=0,
        pid=1,
        exitcode=exitcode,
        message=message,
        traceback=traceback,
        **more,
    )


def told(message: str, **more) -> Failure:
    """An exception that the script raised."""
    return failure(message, traceback=f"Traceback ...\n{message}", **more)


BUG = failure("ValueError: bad batch", traceback="Traceback ...\nValueError: bad batch")
SYNTAX = told("SyntaxError: invalid syntax (train.py, line 3)")
KILLED = failure("killed by SIGKILL", -9)
SEGFAULT = failure("killed by SIGSEGV", -11)
ABORTED = failure("killed by SIGABRT", -6)
GLOO = failure("RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
NCCL = failure("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1234")
NCCL2 = failure("RuntimeError: NCCL operation timed out")  # torch 2.15
STORE = failure("torch.distributed.DistNetworkError: failed to recv, got 0 bytes")
WRAPPED = failure(
    "RuntimeError: step 7 failed",
    traceback="Traceback (most recent call last):\n"
    "ConnectionResetError: [Errno 104] Connection reset by peer\n\n"
    "During handling of the above exception, another exception occurred:\n"
    "RuntimeError: step 7 failed",
)
SPEAKS_OF_IT = failure(
    "KeyError: 'x'",
    traceback='Traceback ...\n  File "net.py"\n    check("Broken pipe")\nKeyError: \'x\'',
)
STOPPED = failure("killed by SIGTERM", -15)
STOPPED_SHELL = failure("exit code 143", 143)
OLDER = failure("ValueError: of another world", generation=2)
#: The user's own network: a cause for all we know, unless there is a better one.
DATA_SERVER = told("ConnectionRefusedError: [Errno 111] Connection refused")
#: The same, or a peer, in the script's own words.
OWN_WORDS = told("ConnectionError: a peer is gone")
#: No connection was broken.
TEXT_ONLY = [
    told("ValueError: the connection refused by the user has no colour"),
    told("KeyError: 'Broken pipe'"),
    told("AssertionError: failed to recv, they said"),
    told("TypeError: connection reset must be a number"),
    told("ConnectionStringError: no host given"),
]
OWN_DEVICE = told(
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1234, unhandled cuda "
    "error (run with NCCL_DEBUG=INFO for details)"
)
LOST = told("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection reset by peer")
SILENT = failure("exit code 1", 1)
ABORTED_SHELL = failure("exit code 134", 134)
#: In-process workers that live on, and say so.
PEER = failure("lost a peer: Connection closed by peer", alive=True)
IN_HANDLER = failure("ValueError: x", -15, traceback="ValueError: x")
WAITED = told("RuntimeError: training failed", waited=True, entered=7)
NODE, OTHER_NODE = (node_failure(name, 3, "its lease has ended") for name in ("b", "c"))


@pytest.mark.parametrize(
    ("failures", "lost", "cause"),
    [
        ([BUG], [], BUG),
        ([GLOO], [], GLOO),
        ([STOPPED], [], STOPPED),
        ([ABORTED], [], ABORTED),
        ([BUG, KILLED], [], BUG),
        ([KILLED, BUG], [], KILLED),
        ([GLOO, BUG], [], BUG),
        ([GLOO, NCCL, SEGFAULT, BUG], [], SEGFAULT),
        ([NCCL, KILLED], [], KILLED),
        ([STORE, KILLED], [], KILLED),
        ([WRAPPED, KILLED], [], KILLED),
        ([SPEAKS_OF_IT, KILLED], [], SPEAKS_OF_IT),
        ([STOPPED, GLOO, BUG], [], BUG),
        ([STOPPED, GLOO], [], GLOO),
        ([STOPPED_SHELL, GLOO], [], GLOO),
        ([GLOO, STORE], [], GLOO),
        # An abort says little, but more than a broken connection, and less than an exception.
        ([ABORTED, BUG], [], ABORTED),
        ([GLOO, ABORTED], [], ABORTED),
        ([GLOO, ABORTED, BUG], [], BUG),
        # Only failures of the same generation explain one another.
        ([GLOO, OLDER], [], GLOO),
        # The user's own goes before what a lost peer leaves behind.
        ([GLOO, DATA_SERVER, NCCL], [], DATA_SERVER),
        ([DATA_SERVER, BUG], [], BUG),
        ([OWN_WORDS, BUG], [], BUG),
        ([OWN_WORDS], [NODE], NODE),
        ([PEER, OWN_DEVICE], [], OWN_DEVICE),
        ([SILENT, GLOO], [], SILENT),
        ([GLOO, SILENT], [], SILENT),
        ([SILENT, BUG], [], SILENT),
        ([GLOO, ABORTED_SHELL], [], ABORTED_SHELL),
        ([PEER, KILLED], [], KILLED),
        ([PEER, GLOO, BUG], [], BUG),
        # A worker that told why it died of SIGTERM is believed.
        ([STOPPED, IN_HANDLER], [], IN_HANDLER),
        # A node is killed: its peers' workers fall, in whatever words and order.
        ([], [NODE], NODE),
        ([], [NODE, OTHER_NODE], NODE),
        ([GLOO, NCCL], [NODE], NODE),
        ([PEER, GLOO], [NODE], NODE),
        ([DATA_SERVER], [NODE], NODE),
        ([SILENT, GLOO], [NODE], NODE),
        ([WAITED], [NODE], NODE),
        ([ABORTED], [NODE], NODE),
        ([LOST, ABORTED], [NODE], NODE),
        ([LOST, ABORTED_SHELL], [NODE], NODE),
        ([STOPPED], [NODE], NODE),
        # A worker told why it died before its node went, or the script failed by itself.
        ([BUG], [NODE], BUG),
        ([GLOO, KILLED], [NODE], KILLED),
        ([SEGFAULT], [NODE], SEGFAULT),
    ],
)
def test_pick(failures, lost, cause):
    first, others = pick(failures, lost)
    assert first is cause
    mates = [item for item in (*failures, *lost) if item.generation == cause.generation]
    assert [replace(item, by_itself=False) for item in others] == [
        item for item in mates if item is not cause
    ]


@pytest.mark.parametrize(
    ("failures", "by_itself"),
    [
        ([SYNTAX, SYNTAX], [True]),
        ([SYNTAX, SYNTAX, GLOO, STOPPED, PEER], [True, False, False, False]),
        ([BUG, SYNTAX], [True]),
        ([KILLED, KILLED, SEGFAULT], [True, True]),
        ([KILLED, SYNTAX, WRAPPED, WAITED], [True, False, False]),
        # Its agent was stopping it already, whatever it says.
        ([SYNTAX, replace(SYNTAX, stopped=True)], [False]),
        # A script may exit, and NCCL's watchdog abort, because a peer is gone.
        ([SYNTAX, SILENT], [False]),
        ([SILENT, SILENT], [True]),
        ([KILLED, ABORTED], [False]),
        ([ABORTED, ABORTED], [True]),
        # Nobody is a cause beside a lost peer.
        ([GLOO, GLOO], [False]),
        ([DATA_SERVER, DATA_SERVER], [False]),
    ],
)
def test_failure_by_itself_is_not_a_consequence(failures, by_itself):
    assert [item.by_itself for item in pick(failures)[1]] == by_itself


def test_worker_waiting_in_a_collective_is_not_the_cause():
    killed_while_waiting = failure("killed by SIGKILL", -9, waited=True, entered=7)
    assert pick([WAITED, BUG])[0] is BUG
    assert pick([WAITED, killed_while_waiting])[0] is killed_while_waiting
    assert pick([WAITED])[0] is WAITED
    assert waited_for_others(WAITED)
    assert not waited_for_others(BUG)
    assert not waited_for_others(DATA_SERVER)


def test_worker_with_fewer_collectives_is_the_cause():
    ahead, behind = (failure(GLOO.message, entered=number) for number in (9, 8))
    assert pick([ahead, behind])[0] is behind
    assert pick([behind, ahead])[0] is behind
    unknown = failure(GLOO.message)
    assert pick([ahead, behind, unknown])[0] is ahead, "where not all are known, who told first"


def test_cause_is_picked_regardless_of_its_collectives():
    ahead, behind = (failure("killed by SIGKILL", -9, entered=number) for number in (9, 8))
    assert pick([ahead, behind])[0] is ahead


def test_no_failures_have_no_cause():
    assert pick([]) == (None, ())


def test_failure_explained_by_a_lost_peer_is_a_consequence():
    for item in (
        *(GLOO, NCCL, NCCL2, STORE, WRAPPED, OWN_WORDS),
        *(STOPPED, STOPPED_SHELL, ABORTED),
    ):
        assert is_consequence(item), item
    for item in (BUG, KILLED, SEGFAULT, SPEAKS_OF_IT, *TEXT_ONLY):
        assert not is_consequence(item), item


def test_an_exception_that_merely_speaks_of_connections_is_a_cause():
    for text_only in TEXT_ONLY:
        assert pick([GLOO, text_only, KILLED])[0] is text_only
