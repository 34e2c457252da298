"""Who holds whose replicas. Pure.

Each node's pieces are held by the nodes that follow it in the order of the world, the first one
after the last. So every node holds as much as it has others hold, none holds its own, and a change
of the world moves as little as can be: who is lost was holder for as many nodes as it had holders,
and each of them has one new one; who joins, at the end of the order, likewise. Nobody has to agree
on anything but the world.
"""

from __future__ import annotations

from collections.abc import Sequence


def holders(nodes: Sequence[str], node: str, replicas: int) -> tuple[str, ...]:
    """The nodes that hold this node's pieces; fewer than asked for where there are fewer others.

    >>> holders(["a", "b", "c"], "b", 1), holders(["a", "b", "c"], "c", 5), holders(["a"], "a", 1)
    (('c',), ('a', 'b'), ())
    """
    if node not in nodes:
        return ()
    at = list(nodes).index(node)
    others = [*nodes[at + 1 :], *nodes[:at]]
    return tuple(others[: max(replicas, 0)])
