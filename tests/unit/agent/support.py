"""Shared by the tests of the agent: an event loop to run in, a place in a world."""

from __future__ import annotations

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
