"""Code that only observes may fail, and is told of once."""

import asyncio
import logging

import pytest

from torchelastic import best_effort
from torchelastic.best_effort import observing, quiet


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(best_effort, "_reported", set())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_failure_is_reported_once(caplog):
    for _ in range(3):
        with observing("Reading the moon"):
            raise ValueError("clouds")
    [sentence] = warnings(caplog)
    assert sentence.startswith("Reading the moon failed; the job is not affected: ValueError: clou")
    assert "test_best_effort.py, line" in sentence


def test_an_end_is_not_a_failure():
    with pytest.raises(KeyboardInterrupt), observing("Reading the moon"):
        raise KeyboardInterrupt
    with pytest.raises(asyncio.CancelledError), observing("Reading the moon"):
        raise asyncio.CancelledError


@quiet
class Teller:
    """Tells; badly where it is told to."""

    def say(self, fails=False):
        if fails:
            raise KeyError("mouth")
        return "said"

    async def say_later(self, fails=False):
        return self._say(fails)

    def _say(self, fails):
        if fails:
            raise KeyError("mouth")
        return "said"


def test_public_methods_of_a_quiet_class_do_not_raise(caplog):
    teller = Teller()
    assert (teller.say(), teller.say(True)) == ("said", None)
    assert asyncio.run(teller.say_later()) == "said"
    assert asyncio.run(teller.say_later(True)) is None
    with pytest.raises(KeyError):
        teller._say(True)
    assert [line.split(" ")[0] for line in warnings(caplog)] == ["Teller.say", "Teller.say_later"]
