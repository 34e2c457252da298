"""The arithmetic of replicas: which workers and nodes make whole ones (`choosing` decides). Pure.

A world of a sharded model is R replicas of S workers. Rank r is in replica r // S; its coordinate
there is r % S, and never changes while the worker lives:

- A replica on one node (S divides the node's workers): the coordinate is the local rank modulo S. A
  node offers the workers of whole blocks of S local ranks.
- A replica that spans k nodes (S is k times a node's workers): each node has a place from 0 to
  k - 1, and its coordinates are those of that place. The leader allots it before the node's workers
  start. Any nodes with different places can make a replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def nodes_per_replica(size: int, nproc: int) -> int:
    """The number of nodes that a replica spans.

    >>> [nodes_per_replica(size, 2) for size in (0, 1, 2, 4, 8)]
    [1, 1, 1, 2, 4]
    """
    return max(size // max(nproc, 1), 1)  # nodes that only take part in the rendezvous have none


def mesh_misfit(mesh: int, nproc: int, *, flag: int, job: int) -> str:
    """Return why a node whose workers made a mesh of `mesh` workers cannot train; empty if it can.
    `flag` is `--replica-size` (0: not given), `job` the mesh of the other nodes.

    >>> mesh_misfit(2, 8, flag=0, job=2), mesh_misfit(4, 2, flag=4, job=4)
    ('', '')
    >>> mesh_misfit(0, 8, flag=0, job=2)
    'its workers made no mesh, but those of other nodes made one of 2 workers'
    """
    made = f"made a mesh of {mesh} workers" if mesh else "made no mesh"
    if flag and mesh != flag:
        return f"its workers {made}, but --replica-size is {flag}: use the same number"
    if mesh != job:
        others = f"made one of {job} workers" if job else "made none"
        return f"its workers {made}, but those of other nodes {others}"
    if flag or mesh <= 1 or nproc % mesh == 0:
        return ""
    return (
        f"its workers {made}, which is not a divisor of its {nproc} workers: change "
        f"--nproc-per-node, or let a replica span nodes with --replica-size {mesh}"
    )


def whole_blocks(ranks: Iterable[int], size: int) -> list[tuple[int, ...]]:
    """The whole blocks of `size` local ranks among these.

    >>> whole_blocks([0, 1, 2, 4, 5], 2)
    [(0, 1), (4, 5)]
    """
    there = set(ranks)
    starts = sorted(rank for rank in there if rank % size == 0)
    blocks = (tuple(range(start, start + size)) for start in starts)
    return [block for block in blocks if there.issuperset(block)]


# --- replicas that span nodes --------------------------------------------------------------------


def allot(
    nodes: Mapping[str, int | None], places: Mapping[str, int], per_replica: int
) -> dict[str, int]:
    """Places for the nodes that have none: the place with the fewest nodes, the lowest of several.
    A node with a static rank gets the place that belongs to it. `places` are those of all nodes.

    >>> allot({"c": None, "d": None}, {"a": 0, "b": 0}, 2)
    {'c': 1, 'd': 1}
    """
    counts = _counts(places.values(), per_replica)
    found: dict[str, int] = {}
    for node, static in nodes.items():
        place = counts.index(min(counts)) if static is None else static % per_replica
        counts[place] += 1
        found[node] = place
    return found


def moves(
    places: Mapping[str, int], movable: Sequence[str], per_replica: int, most: int
) -> dict[str, int]:
    """Other places for nodes that are in no world, if they then complete more replicas, of at most
    `most`. `movable` are nodes that may move, the best first.

    >>> moves({"a": 0, "b": 1, "c": 0, "d": 0}, ["d"], 2, most=2)
    {'d': 1}
    """
    counts = _counts(places.values(), per_replica)
    for target in range(min(len(places) // per_replica, most), min(counts), -1):
        surplus = [count - target for count in counts]
        short = [place for place in range(per_replica) for _ in range(-surplus[place])]
        found: dict[str, int] = {}
        for node in movable:
            if short and surplus[places[node]] > 0:
                surplus[places[node]] -= 1
                found[node] = short.pop(0)
        if not short:
            return found
    return {}


def most_replicas(places: Iterable[int], per_replica: int) -> int:
    """The number of replicas that nodes with these places complete."""
    return min(_counts(places, per_replica))


def _counts(places: Iterable[int], per_replica: int) -> list[int]:
    counts = [0] * per_replica
    for place in places:
        counts[place] += 1
    return counts


def by_place(nodes: Iterable[tuple[int, T]], per_replica: int) -> list[list[T]]:
    """The nodes of each place, in their order."""
    found: list[list[T]] = [[] for _ in range(per_replica)]
    for place, node in nodes:
        found[place].append(node)
    return found


def arranged(
    nodes: Sequence[tuple[str, int]], last: Mapping[str, int], per_replica: int
) -> list[str]:
    """The nodes replica by replica, place by place. `nodes` have their places, as many of each,
    and come in the order that ranks keep; `last` are the node ranks of the last world.

    Nodes that made a replica stay together; the others find new partners in their order.

    >>> arranged([("b", 1), ("c", 0), ("d", 1), ("e", 0)], {"a": 0, "b": 1, "c": 2, "d": 3}, 2)
    ['e', 'b', 'c', 'd']
    """
    position = {node: index for index, (node, _) in enumerate(nodes)}
    former: dict[int, dict[int, str]] = {}
    for node, place in nodes:
        if node in last and last[node] % per_replica == place:
            former.setdefault(last[node] // per_replica, {})[place] = node
    whole = [made for made in former.values() if len(made) == per_replica]
    replicas = [[made[place] for place in range(per_replica)] for made in whole]
    together = {node for made in replicas for node in made}
    alone = by_place(((place, n) for n, place in nodes if n not in together), per_replica)
    replicas += [list(made) for made in zip(*alone, strict=True)]
    replicas.sort(key=lambda made: min(position[node] for node in made))
    return [node for made in replicas for node in made]


# --- words ---------------------------------------------------------------------------------------


def lacking(nodes: Mapping[str, tuple[int, Collection[int]]], size: int) -> str:
    """Say what keeps nodes from making one whole replica: of each node its workers and the local
    ranks that are ready.

    >>> lacking({"node-a": (2, [0])}, 2)
    'no whole replica: node-a lacks rank 1'
    """
    for name, (nproc, ranks) in nodes.items():
        missing = sorted({*range(nproc)}.difference(ranks))
        if ranks and missing:
            several = "s" if len(missing) > 1 else ""
            return f"no whole replica: {name} lacks rank{several} {', '.join(map(str, missing))}"
    return f"no whole replica of {size} workers is ready"
