from __future__ import annotations

import pytest

from torchelastic.failure import Failure
from torchelastic.rendezvous.root_cause import is_consequence, pick


def failure(
    message: str = "", exitcode: int = 1, *, traceback: str = "", generation: int = 3
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
    )


BUG = failure("ValueError: bad batch", traceback="Traceback ...\nValueError: bad batch")
KILLED = failure("killed by SIGKILL", -9)
SEGFAULT = failure("killed by SIGSEGV", -11)
ABORTED = failure("killed by SIGABRT", -6)
GLOO = failure("RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
NCCL = failure("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1234")
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


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([BUG], BUG),
        ([GLOO], GLOO),
        ([STOPPED], STOPPED),
        ([ABORTED], ABORTED),
        ([BUG, KILLED], BUG),
        ([KILLED, BUG], KILLED),
        ([GLOO, BUG], BUG),
        ([GLOO, NCCL, SEGFAULT, BUG], SEGFAULT),
        ([NCCL, KILLED], KILLED),
        ([STORE, KILLED], KILLED),
        ([WRAPPED, KILLED], KILLED),
        ([SPEAKS_OF_IT, KILLED], SPEAKS_OF_IT),
        ([STOPPED, GLOO, BUG], BUG),
        ([STOPPED, GLOO], GLOO),
        ([STOPPED_SHELL, GLOO], GLOO),
        ([GLOO, STORE], GLOO),
        # An abort says little, but more than a broken connection, and less than an exception.
        ([ABORTED, BUG], ABORTED),
        ([GLOO, ABORTED], ABORTED),
        ([GLOO, ABORTED, BUG], BUG),
        # Only failures of the same generation explain one another.
        ([GLOO, OLDER], GLOO),
    ],
)
def test_pick(failures, cause):
    first, others = pick(failures)
    assert first is cause
    mates = [item for item in failures if item.generation == cause.generation]
    assert list(others) == [item for item in mates if item is not cause]


def test_no_failures_have_no_cause():
    assert pick([]) == (None, ())


@pytest.mark.parametrize("item", [GLOO, NCCL, STORE, WRAPPED, STOPPED, STOPPED_SHELL, ABORTED])
def test_these_can_be_explained_by_the_loss_of_somebody_else(item):
    assert is_consequence(item)


@pytest.mark.parametrize("item", [BUG, KILLED, SEGFAULT, SPEAKS_OF_IT])
def test_these_cannot(item):
    assert not is_consequence(item)


def test_a_worker_that_told_why_it_died_of_sigterm_is_believed():
    told = failure("ValueError: in the handler", -15, traceback="ValueError: in the handler")
    assert pick([STOPPED, told])[0] is told
