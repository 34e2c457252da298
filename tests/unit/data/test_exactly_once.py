"""Sampler, policy and checker together, while workers die, come and roll back.

A model of a job: its ranks take turns in one process, each with its own sampler and loader, and
what happens is drawn. A step is entered by all; some commit it, then some die. The others go on
from the freshest version among them, or from a checkpoint if there are none.
"""

from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.worlds import examples
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler, ElasticStream
from torchelastic.data.order import Order
from torchelastic.data.progress import Position
from torchelastic.data.streaming import records_from
from torchelastic.data.verdict import Line, check

EPOCHS = 2


class Way(Enum):
    """How a training comes to its next epoch, and what becomes of processes."""

    #: They live on. A step that finds nothing left begins the next epoch.
    IN_STEP = 1
    #: They live on. The end of an epoch is a step of its own, without samples.
    OWN_STEP = 2
    #: All are started anew, with what was kept of them. The end of an epoch is no step.
    RESTARTED = 3


class Worker:
    """What one process has."""

    def __init__(self, make):
        self.sampler, self.loader = make()
        self.batches = iter(self.loader)
        #: (generation, steps), as of a state; and what was kept of it then.
        self.version = (-1, 0)
        self.kept = self.sampler.state_dict()

    def take(self, way):
        """What is handed out for a step; None at the end of an epoch."""
        if next(self.batches, None) is not None:
            return self.loader.handed
        self.batches = iter(self.loader)
        if way is Way.IN_STEP and self.sampler.epoch < EPOCHS:
            next(self.batches)
            return self.loader.handed
        return None

    def commit(self, version):
        self.sampler.committed()
        self.version, self.kept = version, self.sampler.state_dict()

    def load(self, version, state):
        self.sampler.load_state_dict(state)
        self.version, self.kept = version, state


class Job:
    def __init__(self, make, way, patch, *, forgetful=False):
        self.make, self.way, self.patch = make, way, patch
        #: Whether a roll-back leaves the data where it is: what must be noticed.
        self.forgetful = forgetful
        self.generation = -1
        self.workers = []
        self.checkpoint = (-1, 0), Worker(make).kept
        self.lines = []
        #: What this test itself saw: step -> (epoch, sample) of all ranks.
        self.seen = {}

    def enter(self, survivors, newcomers):
        """The next world: its base is the freshest version, and all are brought there."""
        self.generation += 1
        base, state = max(
            [(one.version, one.kept) for one in survivors] or [self.checkpoint],
            key=lambda held: held[0],
        )
        if self.way is Way.RESTARTED:
            survivors, newcomers = [], newcomers + len(survivors)
        fresh = [Worker(self.make) for _ in range(newcomers)]
        self.workers = survivors + fresh
        for worker in self.workers:
            if worker in fresh or worker.version < base:
                worker.load(base, state)
            worker.version = (self.generation, base[1])
        self.seen = {step: taken for step, taken in self.seen.items() if step <= base[1]}

    def step(self, committing):
        """All enter it; so many of them, the first ones, commit it."""
        taken = [self.as_rank(rank).take(self.way) for rank in range(len(self.workers))]
        if None in taken:
            assert set(taken) == {None}  # all ranks come to the end together
            if self.way is Way.RESTARTED:
                return
        self.commit(taken, committing)

    def commit(self, taken, committing):
        version = self.generation, self.workers[0].version[1] + 1
        handed = [one for one in taken if one is not None]
        if committing:
            self.seen[version[1]] = [(one.epoch, sample) for one in handed for sample in one.ids]
        for worker in self.workers[:committing]:
            worker.commit(version)
            assert worker.kept == self.workers[0].kept
            self.lines += [line(version, one) for one in worker.sampler.latest]

    def as_rank(self, rank):
        self.patch.setenv("RANK", str(rank))
        self.patch.setenv("WORLD_SIZE", str(len(self.workers)))
        return self.workers[rank]

    def interrupt(self, committed):
        """Who has not committed the step goes back to its beginning."""
        for worker in self.workers[committed:]:
            if not self.forgetful:
                worker.load(worker.version, worker.kept)

    def save(self):
        self.checkpoint = (-1, self.workers[0].version[1]), self.workers[0].kept

    def done(self):
        return self.workers[0].sampler.epoch >= EPOCHS


def line(version, handed):
    generation, step = version
    return Line(generation=generation, step=step, **vars(handed))


def live(job, draw):
    """Worlds and what happens to them, until the epochs are done."""
    job.enter([], draw(st.integers(1, 4)))
    for _ in range(draw(st.integers(0, 6))):
        for _ in range(draw(st.integers(0, 6))):
            job.step(len(job.workers))
            if job.done():
                return
        if draw(st.booleans()):
            job.save()
        size = len(job.workers)
        if draw(st.booleans()):  # a failure inside a step, else a resize between two
            committed = draw(st.integers(0, size))
            job.step(committed)
            job.interrupt(committed)
            if job.done():
                return
        alive = draw(st.sets(st.integers(0, size - 1)))
        survivors = [worker for rank, worker in enumerate(job.workers) if rank in alive]
        job.enter(survivors, draw(st.integers(0 if survivors else 1, 3)))
    while not job.done():
        job.step(len(job.workers))


def used(job):
    """Without the checker: what this test saw in steps that count, in their order."""
    return [taken for step in sorted(job.seen) for taken in job.seen[step]]


def in_order(samples_of):
    """What is to be used: in the same order in any history."""
    return [(epoch, sample) for epoch in range(EPOCHS) for sample in samples_of(epoch)]


def trained(make, way, draw, **how):
    with pytest.MonkeyPatch.context() as patch:
        job = Job(make, way, patch, **how)
        live(job, draw)
    return job


POLICIES = st.builds(
    BatchPolicy.constant_global, st.integers(1, 12), micro=st.none() | st.integers(1, 4)
) | st.builds(BatchPolicy.scale_with_world, st.integers(1, 4))


def sampled(length, policy):
    def make():
        sampler = ElasticSampler(length, seed=7)
        return sampler, DataLoader(range(length), sampler=sampler, policy=policy)

    return make


@examples(20)
@given(length=st.integers(1, 40), policy=POLICIES, way=st.sampled_from(Way), data=st.data())
def test_every_sample_is_used_once_under_any_faults(length, policy, way, data):
    job = trained(sampled(length, policy), way, data.draw)
    verdict = check(job.lines, expected=range(length), epochs=EPOCHS)
    assert verdict.ok, str(verdict)
    assert used(job) == in_order(lambda epoch: Order(length, 7, epoch).at(0, length))


@examples(12)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    window=st.integers(1, 8),
    policy=POLICIES,
    way=st.sampled_from(Way),
    data=st.data(),
)
def test_every_record_of_a_stream_is_used_once_under_any_faults(counts, window, policy, way, data):
    def make():
        stream = ElasticStream([range(count) for count in counts], window=window, seed=7)
        return stream, DataLoader(stream, policy=policy)

    job = trained(make, way, data.draw)
    expected = [(shard, record) for shard, count in enumerate(counts) for record in range(count)]
    verdict = check(job.lines, expected=expected, epochs=EPOCHS)
    assert verdict.ok, str(verdict)
    stream, _ = make()
    assert used(job) == in_order(
        lambda epoch: [(one.shard, one.number) for one in records_from(stream, 7, Position(epoch))]
    )


@pytest.mark.parametrize("committed", [0, 1])
def test_a_step_that_is_not_taken_back_in_the_data_is_noticed(committed):
    """The same model with a fault in it: the checker has to see what the test sees."""
    answers = iter([2, 1, 1, False, True, committed, {1}, 0])
    make = sampled(12, BatchPolicy.constant_global(4))
    job = trained(make, Way.IN_STEP, lambda _: next(answers), forgetful=True)
    assert sorted(used(job)) != [(epoch, sample) for epoch in range(EPOCHS) for sample in range(12)]
    verdict = check(job.lines, expected=range(12), epochs=EPOCHS)
    assert "generation 1 has lines with world sizes 1 and 2" in verdict.contradictions
