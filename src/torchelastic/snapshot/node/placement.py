"""The placement of replicas on nodes. Pure.

The nodes that follow a node in the order of the world, as in a ring, hold its pieces. So every node
holds as much for others as others hold for it, none holds its own, and a change of the world moves
as little as possible: each node that a lost node held replicas for gets one new holder, and the
same for a node that joins at the end of the order. Nodes need to agree only on the world.
"""

from __future__ import annotations

from collections.abc import Sequence


def holders(nodes: Sequence[str], node: str, replicas: int) -> tuple[str, ...]:
    """Return the nodes that hold this node's pieces: `replicas` of them, or all others.

    >>> holders(["a", "b", "c"], "b", 1), holders(["a", "b", "c"], "c", 5), holders(["a"], "a", 1)
    (('c',), ('a', 'b'), ())
    """
    if node not in nodes:
        return ()
    at = list(nodes).index(node)
    others = [*nodes[at + 1 :], *nodes[:at]]
    return tuple(others[: max(replicas, 0)])
