"""Which Ray nodes get an agent, when agents start and leave, and when the job has ended. Pure.

The controller calls `plan` about twice a second with everything it sees, and performs the actions.
Training never waits for it: the agents agree among themselves; the plan follows the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchelastic.backoff import pause
from torchelastic.errors import (
    EXIT_FAILED,
    EXIT_NOT_ENOUGH_NODES,
    EXIT_OK,
    EXIT_USAGE,
    FAILED,
)

#: The most agents in a list of endpoints; a majority of the list begins a job.
ENDPOINTS = 3
#: Seconds that the first agents wait for others that Ray is still placing.
FOUNDING = 5.0
#: Seconds after which an actor that Ray cannot place gives way to another node.
PLACEMENT = 30.0
#: Seconds that agents get to end by themselves after one has seen the end of the job.
ENDING = 60.0
#: Seconds before a node whose agent ended early gets another one: doubled each time, up to a limit.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: How often an agent may fail on a node before it was in a world.
MOST_STARTS = 5

#: `pending`: Ray is placing the actor. `placed`: it has no agent yet. `running`, `leaving`: it has.
#: `ended`: the agent has an exit code. `lost`: the actor or its node is gone.
Phase = Literal["pending", "placed", "running", "leaving", "ended", "lost"]


@dataclass(frozen=True)
class RayNode:
    """A live node of the Ray cluster."""

    id: str
    resources: Mapping[str, float]
    #: When Ray takes it away, on the clock of `plan`; None: it stays; inf: it goes, some time.
    leaves_at: float | None = None


@dataclass(frozen=True)
class NodeAgent:
    """An actor on a Ray node and its agent. It stays in the list when it is gone."""

    name: str
    node: str
    phase: Phase
    #: When this phase began.
    since: float
    #: Where its agent listens.
    endpoint: str = ""
    #: What its agent was told to look for.
    endpoints: tuple[str, ...] = ()
    #: The generation of its newest world; -1: none yet.
    generation: int = -1
    exitcode: int | None = None
    #: The actor has been removed.
    removed: bool = False

    @property
    def is_live(self) -> bool:
        return self.phase in ("pending", "placed", "running", "leaving")


@dataclass(frozen=True)
class Wanted:
    """The nodes and resources that the user asked for."""

    min_nodes: int
    max_nodes: int
    #: What one agent takes of its node.
    resources: Mapping[str, float] = field(default_factory=dict)
    #: Seconds to wait for the first `min_nodes`; 0: forever.
    wait_for_nodes: float = 0.0
    #: When the controller began to look.
    since: float = 0.0
    #: Why all agents are to leave; empty: they are not.
    stop: str = ""


@dataclass(frozen=True)
class Place:
    """Create an actor on a node."""

    node: str


@dataclass(frozen=True)
class Start:
    """Start the agent of an actor."""

    name: str
    endpoints: tuple[str, ...]


@dataclass(frozen=True)
class Leave:
    """Ask an agent to leave the job."""

    name: str
    why: str
    #: How much time it has; None: as much as the job gives a leaving node.
    seconds: float | None = None


@dataclass(frozen=True)
class Remove:
    """Remove an actor, and with it whatever still runs in it."""

    name: str
    why: str


@dataclass(frozen=True)
class Finish:
    """The job has ended. `exitcode` None: whoever asked the agents to leave knows."""

    exitcode: int | None
    why: str


Action = Place | Start | Leave | Remove | Finish


def plan(
    nodes: Sequence[RayNode], agents: Sequence[NodeAgent], wanted: Wanted, now: float
) -> list[Action]:
    """Return what is to be done now; nothing if all is as it should be."""
    there = {node.id: node for node in nodes}
    live = [agent for agent in agents if agent.is_live]
    if wanted.stop or verdict(agents) is not None:
        return _end(agents, live, there, wanted, now)
    actions: list[Action] = [
        Remove(agent.name, "its agent has ended" if agent.phase == "ended" else "it is gone")
        for agent in agents
        if not agent.is_live and not agent.removed
    ]
    for agent in live:
        if action := _trouble(agent, live, there, now):
            actions.append(action)
    touched = {action.name for action in actions if isinstance(action, Leave | Remove)}
    staying = [a for a in live if a.name not in touched and a.phase != "leaving"]
    places = _places(nodes, agents, wanted, now)[: wanted.max_nodes - len(staying)]
    actions += map(Place, places)
    actions += _starts(staying, wanted, now)
    if not live and not places and (end := _hopeless(nodes, agents, wanted, now)):
        actions.append(end)
    return actions


def verdict(agents: Iterable[NodeAgent]) -> int | None:
    """Return the exit code of the job if an agent has seen its end, else None.

    0 comes from a world that was closed because every worker of it succeeded; failure and too few
    nodes are decisions for the whole job as well. Everything else concerns one node, and so does
    the failure of an agent that was never in a world.
    """
    seen = {agent.exitcode for agent in agents if not _failed_alone(agent)}
    final = (EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_ENOUGH_NODES)
    return next((code for code in final if code in seen), None)


def _failed_alone(agent: NodeAgent) -> bool:
    """Return whether an agent failed before it was in a world, perhaps unlike others."""
    return agent.exitcode in FAILED and agent.generation < 0


def _given_up(node: str, agents: Iterable[NodeAgent]) -> bool:
    """Return whether a node gets no more agents: it refused the job, or failed too often."""
    failed = [agent for agent in agents if agent.node == node and _failed_alone(agent)]
    return len(failed) >= MOST_STARTS or any(agent.exitcode == EXIT_USAGE for agent in failed)


def sentence(agents: Sequence[NodeAgent], wanted: Wanted) -> str:
    """The state of the job in one sentence."""
    training = [agent for agent in agents if agent.phase == "running" and agent.generation >= 0]
    counts = {
        "joining": sum(agent.phase == "running" for agent in agents) - len(training),
        "starting": sum(agent.phase in ("pending", "placed") for agent in agents),
        "leaving": sum(agent.phase == "leaving" for agent in agents),
        "lost": sum(agent.phase == "lost" for agent in agents),
    }
    shape = f"{wanted.min_nodes}:{wanted.max_nodes}"
    if (code := verdict(agents)) is not None:
        told = "training is complete" if code == EXIT_OK else f"the job failed (exit code {code})"
    elif training:
        newest = max(agent.generation for agent in training)
        told = f"{len(training)} of {shape} nodes in the job, generation {newest}"
    else:
        told = f"waiting for {shape} nodes"
    return ", ".join([told, *(f"{count} {word}" for word, count in counts.items() if count)])


def _end(
    agents: Sequence[NodeAgent],
    live: Sequence[NodeAgent],
    there: Mapping[str, RayNode],
    wanted: Wanted,
    now: float,
) -> list[Action]:
    """Let every agent end; finish when the last one has.

    Actors of ended agents stay: they tell a new controller that the job has ended.
    """
    code = verdict(agents)
    if not live:
        return [Finish(code, wanted.stop or sentence(agents, wanted))]
    ends = [agent.since for agent in agents if agent.phase == "ended"]
    overdue = code is not None and now - min(ends, default=now) > ENDING
    actions: list[Action] = []
    for agent in live:
        if agent.node not in there:
            actions.append(Remove(agent.name, "its node is gone"))
        elif agent.phase in ("pending", "placed"):
            actions.append(Remove(agent.name, "the job has ended"))
        elif overdue:
            actions.append(Remove(agent.name, "it has not ended with the job"))
        elif wanted.stop and agent.phase == "running":
            actions.append(Leave(agent.name, wanted.stop))
    return actions


def _trouble(
    agent: NodeAgent, live: Sequence[NodeAgent], there: Mapping[str, RayNode], now: float
) -> Action | None:
    """Return the action for an agent that must leave or be removed; None if it can stay."""
    node = there.get(agent.node)
    if node is None:
        return Remove(agent.name, "its node is gone")
    if node.leaves_at is not None:
        if agent.phase == "running":
            left = max(node.leaves_at - now, 0.0)
            return Leave(agent.name, "Ray drains the node", left if math.isfinite(left) else None)
        return None if agent.phase == "leaving" else Remove(agent.name, "its node goes away")
    if agent.phase == "pending" and now - agent.since > PLACEMENT:
        return Remove(agent.name, f"Ray could not place it within {PLACEMENT:.0f} s")
    others = set(agent.endpoints) - {agent.endpoint}
    reachable = {one.endpoint for one in live}
    if agent.phase == "running" and agent.generation < 0 and others and not others & reachable:
        return Remove(agent.name, "every agent that it was to meet is gone")
    return None


def _places(
    nodes: Sequence[RayNode], agents: Sequence[NodeAgent], wanted: Wanted, now: float
) -> list[str]:
    """Return the nodes that could have an agent and have none."""
    taken = {agent.node for agent in agents if agent.is_live}
    return sorted(
        node.id
        for node in nodes
        if _fits(node, wanted) and node.id not in taken and now >= _free_at(node.id, agents)
    )


def _fits(node: RayNode, wanted: Wanted) -> bool:
    enough = all(node.resources.get(name, 0) >= need for name, need in wanted.resources.items())
    return enough and node.leaves_at is None


def _free_at(node: str, agents: Iterable[NodeAgent]) -> float:
    """Return when a node may get another agent; inf: never."""
    ends = [agent for agent in agents if agent.node == node and not agent.is_live]
    if not ends:
        return -math.inf
    if _given_up(node, ends):
        return math.inf
    return max(agent.since for agent in ends) + pause(len(ends), FIRST_PAUSE, LONGEST_PAUSE)


def _starts(staying: Sequence[NodeAgent], wanted: Wanted, now: float) -> list[Start]:
    """Start agents: the first ones together, each later one beside those that run."""
    placed = sorted((a for a in staying if a.phase == "placed"), key=lambda a: (a.since, a.name))
    running = [agent for agent in staying if agent.phase == "running"]
    if running:
        met = [agent for agent in running if agent.generation >= 0] or running
        first = sorted(met, key=lambda a: (a.since, a.name))
    else:
        coming = [agent.since for agent in staying if agent.phase == "pending"]
        if len(placed) < wanted.min_nodes or now - min(coming, default=-math.inf) < FOUNDING:
            return []
        first = placed
    endpoints = tuple(agent.endpoint for agent in first[:ENDPOINTS])
    # With its own endpoint in the list an agent listens there, and cannot begin a job alone.
    return [Start(a.name, tuple(dict.fromkeys((*endpoints, a.endpoint)))) for a in placed]


def _hopeless(
    nodes: Sequence[RayNode], agents: Sequence[NodeAgent], wanted: Wanted, now: float
) -> Finish | None:
    """Return the end of a job that no node can run, or that has waited too long for nodes."""
    fit = [node.id for node in nodes if _fits(node, wanted)]
    if fit and all(_given_up(node, agents) for node in fit):
        code = max(agent.exitcode or 0 for agent in agents if _failed_alone(agent))
        return Finish(code, "No node can run the job; their logs say why.")
    waited = now - max([wanted.since, *(agent.since for agent in agents)])
    if 0 < wanted.wait_for_nodes < waited:
        need = ", ".join(f"{name}: {value:g}" for name, value in wanted.resources.items())
        return Finish(
            EXIT_NOT_ENOUGH_NODES,
            f"Fewer than {wanted.min_nodes} Ray nodes with {{{need}}} for "
            f"{wanted.wait_for_nodes:.0f} s.",
        )
    return None
