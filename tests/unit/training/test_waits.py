"""What the training thread waits for others is counted, and what other threads wait is not."""

import threading

import pytest

from tests.support import poll_for
from torchelastic import stalls
from torchelastic.training import waits as waits_module
from torchelastic.training.waits import Operation, Waits


class Hands:
    """A second at each look."""

    at = 0.0

    def monotonic(self) -> float:
        self.at += 1.0
        return self.at


@pytest.fixture
def waited(monkeypatch):
    monkeypatch.setattr(waits_module, "time", Hands())
    before = list(stalls.seconds)
    place = stalls.COUNTED.index("peers")
    yield lambda: stalls.seconds[place] - before[place]
    stalls.seconds[:] = type(stalls.seconds)("d", before)


def finish_when_waited_for(operation: Operation) -> None:
    def finish() -> None:
        poll_for(lambda: "_gate" in vars(operation), what="somebody waits")
        operation.finish(None, None)

    finisher = threading.Thread(target=finish)
    finisher.start()
    operation.wait()
    finisher.join()


def test_the_training_thread_is_counted(waited):
    finish_when_waited_for(Operation(Waits(), 1))
    assert waited() == 1.0


def test_another_thread_is_not(waited):
    operation = Operation(Waits(), 1)
    other = threading.Thread(target=finish_when_waited_for, args=(operation,))
    other.start()
    other.join()
    assert waited() == 0.0


def test_what_is_done_already_is_not_waited_for(waited):
    operation = Operation(Waits(), 1)
    operation.finish(None, None)
    operation.wait()
    assert waited() == 0.0
