"""The cast of the agent's tests: an event loop to run in, a place in a world, workers."""

import asyncio
import functools

from torchelastic.rendezvous.world import WorldNode

PATIENCE = 30.0


def in_loop(test):
    """Make a plain test of one that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), PATIENCE))

    return run


def place(
    node, node_rank=0, nproc=2, *, role="default", first_rank=0, first_role_rank=0, **fields
) -> WorldNode:
    """A node whose name is also its address."""
    facts = {"name": node, "addr": node, "local_ranks": tuple(range(nproc)), **fields}
    return WorldNode(
        node=node,
        node_rank=node_rank,
        nproc=nproc,
        role=role,
        first_rank=first_rank,
        first_role_rank=first_role_rank,
        **facts,
    )


class Workers:
    """The pool of a node as the others see it: processes with these pids. It notes what is done to
    them, and answers every other question with what was given for it, a value or a function."""

    def __init__(self, *pids, **answers):
        self.pids = dict(enumerate(pids))
        self.pid = self.pids.get
        self.helpers, self.stopping = set(), False
        self.killed, self.failed, self.condemned, self.pongs = [], [], {}, {}
        self.pong = self.pongs.get
        #: Set when one is killed.
        self.some = asyncio.Event()
        for name, answer in answers.items():
            known = answer if callable(answer) else lambda local_rank, answer=answer: answer
            setattr(self, name, known)

    @property
    def alive(self):
        return tuple(self.pids)

    def last_stack(self, local_rank):
        return self.condemned.get(local_rank, (None, None))[1]

    def condemn(self, local_rank, why, stack=""):
        self.condemned[local_rank] = why, stack

    def kill(self, local_rank, why, stack="", *, over=False):
        self.killed.append((local_rank, why, stack))
        self.some.set()

    def fail(self, local_rank, why, *, alive=False):
        self.failed.append((local_rank, why, alive))
