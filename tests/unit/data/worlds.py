"""Worlds of loaders in one process: steps, roll-backs, resizes."""

from __future__ import annotations

from hypothesis import settings

from tests.support import SOAK
from torchelastic.data.loader import DataLoader
from torchelastic.data.own_rank import OwnRank
from torchelastic.data.progress import DataProgress
from torchelastic.data.sampler import ElasticSampler
from torchelastic.data.streaming import ElasticStream


def examples(count):
    """So many, always the same ones; more, and others each time, when they are to be searched."""
    return settings(max_examples=count * SOAK)


class Placed(DataProgress):
    """One whose rank can be changed, as in a process that lives from world to world."""

    here = OwnRank(0, 1)

    def world(self) -> OwnRank:
        return self.here


class PlacedSampler(Placed, ElasticSampler):
    pass


class PlacedStream(Placed, ElasticStream):
    pass


class Worker:
    """A process with a loader, and the one iterator that its train_step keeps."""

    def __init__(self, make_loader):
        self.loader = make_loader()
        self.data = self.loader.sampler
        self.batches = iter(self.loader)

    def take(self):
        """The next batch, of the next epoch if this one has ended, as lists."""
        try:
            return next(self.batches).tolist()
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches).tolist()


class World:
    """Workers that take steps together."""

    def __init__(self, make_loader, size):
        self._make_loader = make_loader
        self.workers = []
        #: What committed steps have used, in the order of steps and ranks: (epoch, sample).
        self.used = []
        self.resize(size)

    def resize(self, size):
        """The first ones stay, newcomers take over the state of a survivor."""
        state = self.workers[0].data.state_dict() if self.workers else None
        del self.workers[size:]
        while len(self.workers) < size:
            self.workers.append(Worker(self._make_loader))
            if state is not None:
                self.workers[-1].data.load_state_dict(state)
        for rank, worker in enumerate(self.workers):
            worker.data.here = OwnRank(rank, size)

    def step(self):
        """All train and commit."""
        batches = [worker.take() for worker in self.workers]
        for worker, batch in zip(self.workers, batches, strict=True):
            worker.data.committed()
            for handed in worker.data.latest:
                ids = list(handed.ids)
                assert len(batch) == max(1, len(ids))
                self.used += [(handed.epoch, one) for one in ids]
        states = [worker.data.state_dict() for worker in self.workers]
        assert all(state == states[0] for state in states)
        assert abs(sum(one.loader.weight for one in self.workers) / len(self.workers) - 1) < 1e-9

    def fail(self, ranks):
        """Some were handed their batches when the step failed; all roll back."""
        saved = [worker.data.state_dict() for worker in self.workers]
        for rank, (worker, state) in enumerate(zip(self.workers, saved, strict=True)):
            if rank in ranks:
                worker.take()
            worker.data.load_state_dict(state)


def sampled(length, **options):
    """What makes a loader over the numbers below `length`."""
    data = list(range(length))
    drop_last = options.pop("drop_last", False)

    def make():
        return DataLoader(data, sampler=PlacedSampler(length, drop_last=drop_last), **options)

    return make
