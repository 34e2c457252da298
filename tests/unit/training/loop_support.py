"""A state and steps for tests of the loop, and what an agent's part of them is made of."""

from tests.support import poll_for
from torchelastic import State
from torchelastic.training import session
from torchelastic.worker.orders import Erred, Finished, Over, Stopped

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


def begin(agent, generation=0, step=0):
    """Let the worker enter a world, in which it trains after this many steps."""
    agent.enter(generation)
    assert agent.up() == (generation, step)


def finish(agent, generation=0, step=STEPS):
    """Hear of the end of the data, and end the training."""
    assert agent.hear(Finished) == Finished(generation, step)
    agent.say(Over(generation, "the training is done", finished=True))
    assert agent.hear(Stopped) == Stopped(generation, step)


def over(agent, generation, step, reason="a failure"):
    agent.say(Over(generation, reason))
    assert agent.hear(Stopped) == Stopped(generation, step)


def again(agent, step, end=STEPS):
    """End the first world; the second begins with this step and trains to the end."""
    over(agent, 0, step)
    begin(agent, 1, step)
    finish(agent, 1, end)


def one_world(end=STEPS, generation=0):
    """The script of a training that nothing disturbs."""

    def script(agent):
        begin(agent, generation)
        finish(agent, generation, end)

    return script


def one_error(step, end=STEPS):
    """The script of a training whose first world ends with an error that rolls back to `step`."""

    def script(agent):
        begin(agent)
        assert agent.hear(Erred).step == step
        again(agent, step, end)

    return script


def up_then_error(agent):
    begin(agent)
    return agent.hear(Erred)


def wait_until_aborted():
    group = session.current().group
    poll_for(lambda: group.aborted, what="the abort")
