"""What is found out of a hang is told once; and who only looks ends nothing."""

import asyncio

from torchelastic.agent.doings import Found
from torchelastic.agent.hang_report import HangReport
from torchelastic.events.hangs import Doing

FOUND = Found(3, (Doing(rank=0, node="a", stack="x"),))


def test_it_is_looked_once_and_told_once():
    looks, told = [], []

    async def look():
        looks.append(1)
        return FOUND

    async def main():
        report = HangReport(look, lambda generation, event: told.append(generation))
        for _ in range(2):
            report.tell(await report.found(3))
        report.close()

    asyncio.run(main())
    assert (looks, told) == ([1], [3])


def test_what_was_seen_of_the_world_before_does_not_count():
    seen = iter([FOUND, Found(4)])

    async def look():
        return next(seen)

    async def main():
        report = HangReport(look, lambda *_: None)
        return await report.found(3), await report.found(4)

    assert asyncio.run(main()) == (FOUND, Found(4))


def test_an_error_in_looking_is_logged_and_nothing_is_told(caplog):
    told = []

    async def look():
        raise RecursionError("too deep")

    async def main():
        report = HangReport(look, lambda *_: told.append(1))
        found = await report.found(0)
        report.tell(found)
        return found

    assert asyncio.run(main()) == Found()
    assert told == []
    assert "could not be looked at" in caplog.text
    assert "too deep" in caplog.text
