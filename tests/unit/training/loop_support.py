"""A state and steps for tests of the loop, and what an agent's part of them is made of."""

from tests.support import poll_for
from torchelastic import State
from torchelastic.training import session
from torchelastic.worker.orders import Finished, Over, Stopped, Up

STEPS = 6


class Counting(State):
    """Counts its steps; what was done is written down where no rollback reaches it."""

    def __init__(self):
        self.count = 0
        self.synced = []

    def sync(self):
        world = session.current()
        self.synced.append((world.generation, self.count, world.versions))

    def snapshot(self):
        return self.count

    def apply(self, snapshot):
        self.count = snapshot


class Steps:
    """A train_step that adds one, writes down what it did, and does as told at given steps."""

    def __init__(self, end=STEPS, **at):
        self.end, self.at, self.taken = end, {int(k[1:]): v for k, v in at.items()}, []

    def __call__(self, state):
        step = state.count
        if step == self.end:
            raise StopIteration
        state.count += 1
        self.taken.append((session.current().generation, step))
        if step in self.at:
            self.at[step]()


def once(error):
    """Raise it the first time only."""
    errors = [error]

    def act():
        if errors:
            raise errors.pop()

    return act


def finish(agent, generation, step=STEPS):
    """Hear of the end of the data, and end the training."""
    assert agent.hear(Finished) == Finished(generation, step)
    agent.say(Over(generation, "the training is done", finished=True))
    assert agent.hear(Stopped) == Stopped(generation, step)


def over(agent, generation, step, reason="a failure"):
    agent.say(Over(generation, reason))
    assert agent.hear(Stopped) == Stopped(generation, step)


def script_of_one_world(agent):
    agent.enter(0)
    agent.hear(Up)
    agent.hear(Finished)
    agent.say(Over(0, "", finished=True))
    agent.hear(Stopped)


def wait_until_aborted():
    group = session.current().group
    poll_for(lambda: group.aborted, what="the abort")
