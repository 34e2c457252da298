"""Which nodes reach each other, for the checker of the laws. Pure."""

from __future__ import annotations

from collections.abc import Collection, Set
from itertools import combinations

#: The ways that are cut: from a node, to a node.
Cuts = Set[tuple[str, str]]


def are_linked(one: str, other: str, cut: Cuts) -> bool:
    """Return whether two nodes reach each other, both ways."""
    return (one, other) not in cut and (other, one) not in cut


def all_linked(nodes: Collection[str], cut: Cuts) -> bool:
    return all(are_linked(one, other, cut) for one, other in combinations(nodes, 2))


def groups(nodes: Set[str], cut: Cuts) -> list[frozenset[str]]:
    """The nodes in groups, none of which hears anything of another.

    >>> sorted(map(sorted, groups({"a", "b", "c"}, {("a", "c"), ("c", "a"), ("b", "c")})))
    [['a', 'b', 'c']]
    """
    left, found = set(nodes), []
    while left:
        group, edge = set[str](), {left.pop()}
        while edge:
            group |= edge
            edge = {
                node
                for node in left
                if any((node, one) not in cut or (one, node) not in cut for one in edge)
            }
            left -= edge
        found.append(frozenset(group))
    return found
