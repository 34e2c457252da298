"""When a lease is over, as its holder must see it."""

from __future__ import annotations

import asyncio

from tests.unit.rendezvous.embedded_support import run, soon, story
from torchelastic.clock import FakeClock, SystemClock
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.membership.lease import HeldLease


def held(clock, *, seconds=15.0, standstill=3.0, sent=0.0) -> tuple[HeldLease, asyncio.Event]:
    lost = asyncio.Event()
    lost.set()  # as after the lease before
    lease = HeldLease(
        "1", seconds=seconds, standstill=standstill, sent=sent, clock=clock, lost=lost
    )
    assert not lost.is_set()
    return lease, lost


def let_run(lease: HeldLease, clock: FakeClock, seconds: float) -> bool:
    """Time goes by, and the loop runs all the time."""
    for _ in range(int(seconds)):
        clock.advance(1.0)
        lease.check()
    return lease.is_held


@story
async def test_lease_ends_counted_from_the_last_renewal_request():
    clock = FakeClock()
    lease, lost = held(clock)
    assert let_run(lease, clock, 14)
    lease.renewed(sent=2.0)
    lease.renewed(sent=1.0)  # an answer that came late takes nothing back
    assert let_run(lease, clock, 2)
    assert not let_run(lease, clock, 1)
    assert lost.is_set()


@story
async def test_lease_ends_at_once_after_a_freeze_of_the_process():
    clock = FakeClock()
    lease, lost = held(clock)
    assert let_run(lease, clock, 4)
    clock.advance(2.9)
    assert lease.check()
    clock.advance(3.0)
    assert not lease.check()
    assert lost.is_set()


@story
async def test_an_ended_lease_stays_ended_and_one_given_back_is_not_lost():
    clock = FakeClock()
    lease, lost = held(clock)
    lease.end()
    lease.renewed(sent=9.0)
    assert not lease.check()
    lease, lost = held(clock)
    lease.give_back()
    clock.advance(20.0)
    assert not lease.check()
    assert not lost.is_set()


@story
async def test_lease_ends_without_being_checked():
    clock = SystemClock()
    _, lost = held(clock, seconds=0.05, standstill=9.0, sent=clock.now())
    await soon(lost.is_set, "the lease is over")
    held(clock, seconds=0.0, sent=clock.now())[0].give_back()


def test_a_loop_that_runs_does_not_stand_still():
    class Looked(FakeClock):
        times = 0

        def now(self):
            self.times += 1
            return super().now()

    async def story():
        clock = Looked()
        lease, _ = held(clock, seconds=60.0, standstill=0.1)
        for _ in range(5):
            clock.advance(0.09)
            before = clock.times
            await soon(lambda before=before: clock.times > before, "the timer has run out")
        assert lease.is_held
        lease.give_back()

    run(story())


@story
async def test_the_lease_is_renewed_until_the_store_is_lost_or_it_expires():
    lease, _ = held(FakeClock())
    answers = [True, RendezvousRefused("not now"), True, RendezvousLost("gone")]

    async def renew():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    await lease.keep(renew, every=0.0)
    assert answers == []
    lease.end()
    await lease.keep(renew, every=0.0)
