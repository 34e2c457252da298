"""The controller of a job on Ray: an actor that follows the cluster and performs the plan.

It keeps nothing that it cannot find again: the actors on the nodes have names, and know how far
their agents are. A new controller continues where the last one was lost.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.state import state as cluster_state
from ray.autoscaler.sdk import request_resources
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
    RpcError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from torchelastic.errors import EXIT_FAILED, EXIT_OK, TorchElasticError
from torchelastic.ray.node_actor import NAMESPACE, AgentState, Call, NodeActor, NodeEnd
from torchelastic.ray.placement_plan import (
    Action,
    Finish,
    Leave,
    NodeAgent,
    Place,
    RayNode,
    Remove,
    Start,
    Wanted,
    plan,
    sentence,
)
from torchelastic.ray.ray_job import cannot_start

#: Seconds between two looks at the cluster.
INTERVAL = 0.5


@dataclass(frozen=True)
class JobRequest:
    """A job, as the driver hands it to the controller."""

    job: str
    config: Mapping[str, Any]
    call: Call
    wanted: Wanted
    secret: str = field(repr=False)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended; `exitcode` None: it was asked to stop."""

    exitcode: int | None
    reason: str
    #: The last exit code on each Ray node; None: the node was lost.
    nodes: Mapping[str, int | None]
    error: TorchElasticError | None
    results: Mapping[int, Any]


def controller_name(job: str) -> str:
    return f"{job}/controller"


def node_actors(job: str) -> list[str]:
    """Return the names of the actors on the nodes of a job."""
    names = (
        one["name"]
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["namespace"] == NAMESPACE
    )
    return sorted(name for name in names if name.startswith(f"{job}/node/"))


class Controller:
    """Follows the cluster until the job has ended."""

    def __init__(self, request: JobRequest) -> None:
        self._request = request
        self._wanted = replace(request.wanted, since=time.monotonic())
        self._agents: dict[str, NodeAgent] = {}
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._ends: dict[str, NodeEnd] = {}
        self._said = ""
        self._found_nodes()

    def __repr__(self) -> str:
        return f"torchelastic {self._request.job} controller"

    def status(self) -> str:
        """Return the state of the job in one sentence."""
        return sentence(list(self._agents.values()), self._wanted)

    def stop(self, why: str) -> None:
        """Let all agents leave."""
        self._wanted = replace(self._wanted, stop=why)

    def follow(self) -> JobEnd:
        """Follow the cluster until the job has ended."""
        request_resources(bundles=[dict(self._wanted.resources)] * self._wanted.max_nodes)
        while True:
            now = time.monotonic()
            self._look(now)
            try:
                nodes = _nodes(now)
            except (RpcError, GetTimeoutError) as error:
                # Ray ends this process if it lasts.
                self._say(f"Ray's control store does not answer; training goes on: {error}")
                time.sleep(INTERVAL)
                continue
            actions = plan(nodes, list(self._agents.values()), self._wanted, now)
            for action in actions:
                if isinstance(action, Finish):
                    request_resources(bundles=[])
                    return self._ended(action)
                self._perform(action, now)
            self._say(self.status())
            time.sleep(max(0.0, now + INTERVAL - time.monotonic()))

    def _found_nodes(self) -> None:
        """Take over the actors that an earlier controller has placed."""
        for name in node_actors(self._request.job):
            try:
                self._handles[name] = ray.get_actor(name, NAMESPACE)
            except ValueError:  # it has just ended
                continue
            node = name.split("/")[-2]
            self._agents[name] = NodeAgent(name, node, "pending", time.monotonic())
        if self._agents:
            self._say(f"a new controller takes over {len(self._agents)} nodes")

    def _look(self, now: float) -> None:
        """Ask every live actor for its state, and take what has been answered."""
        for name, agent in self._agents.items():
            if agent.is_live and name not in self._asked:
                self._asked[name] = self._handles[name].state.remote()
        refs = {ref: name for name, ref in self._asked.items()}
        ready, _ = (
            ray.wait(list(refs), num_returns=len(refs), timeout=INTERVAL) if refs else ([], [])
        )
        for ref in ready:
            name = refs[ref]
            del self._asked[name]
            try:
                self._take(name, ray.get(ref), now)
            except (ActorUnavailableError, RayTaskError) as error:
                # The network, or the actor's disk; its agent runs, and it is asked again.
                self._say(f"node {self._agents[name].node[:8]} does not answer: {_first(error)}")
            except RayError as error:
                self._lost(name, error, now)

    def _lost(self, name: str, error: RayError, now: float) -> None:
        lost = replace(self._agents[name], phase="lost", since=now)
        if isinstance(error, RayActorError) and error.actor_init_failed:
            # Another actor there will probably fail, too: it counts as a failed start.
            why = cannot_start(f"actor on node {lost.node[:8]}", error)
            self._ends[name] = NodeEnd(EXIT_FAILED, TorchElasticError(why))
            lost = replace(lost, exitcode=EXIT_FAILED)
            self._say(why)
        else:
            self._say(f"lost the actor on node {lost.node[:8]}: {_first(error)}")
        self._agents[name] = lost

    def _take(self, name: str, state: AgentState, now: float) -> None:
        before = self._agents[name]
        if state.phase == "ended":
            self._ends[name] = ray.get(self._handles[name].end.remote())
        since = before.since if before.phase == state.phase else now
        self._agents[name] = replace(
            before,
            phase=state.phase,
            since=since,
            endpoint=state.endpoint,
            endpoints=state.endpoints,
            generation=state.generation,
            exitcode=state.exitcode,
        )

    def _perform(self, action: Action, now: float) -> None:
        match action:
            case Place(node):
                self._place(node, now)
            case Start(name, endpoints):
                request = self._request
                self._handles[name].start.remote(request.config, request.call, endpoints)
                self._agents[name] = replace(
                    self._agents[name], phase="running", since=now, endpoints=endpoints
                )
            case Leave(name, why, seconds):
                within = "" if seconds is None else f" within {seconds:.0f} s"
                self._say(f"node {self._agents[name].node[:8]} leaves{within}: {why}")
                self._handles[name].leave.remote(why, seconds)
                self._agents[name] = replace(self._agents[name], phase="leaving", since=now)
            case Remove(name, why):
                self._remove(name, why, now)

    def _place(self, node: str, now: float) -> None:
        request = self._request
        name = f"{request.job}/node/{node}/{uuid.uuid4().hex[:6]}"
        more = dict(request.wanted.resources)
        actor: Any = ray.remote(NodeActor)
        self._handles[name] = actor.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",  # the end of the controller must not end it
            max_concurrency=8,
            num_cpus=more.pop("CPU", 0),
            num_gpus=more.pop("GPU", 0),
            memory=more.pop("memory", None),
            resources=more,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(request.job, controller_name(request.job), request.secret)
        self._agents[name] = NodeAgent(name, node, "pending", now)

    def _remove(self, name: str, why: str, now: float) -> None:
        agent = self._agents[name]
        if agent.is_live:
            self._say(f"removes the agent on node {agent.node[:8]}: {why}")
            agent = replace(agent, phase="lost", since=now)
        ray.kill(self._handles[name])
        self._asked.pop(name, None)
        self._agents[name] = replace(agent, removed=True)

    def _ended(self, finish: Finish) -> JobEnd:
        ends, agents = list(self._ends.values()), self._agents.values()
        return JobEnd(
            exitcode=finish.exitcode,
            reason=finish.why,
            nodes={one.node: one.exitcode for one in sorted(agents, key=lambda one: one.since)},
            error=_error(ends, finish),
            results={
                rank: value
                for end in ends
                if end.exitcode == EXIT_OK
                for rank, value in end.results.items()
            },
        )

    def _say(self, text: str) -> None:
        if text != self._said:
            print(f"[torchelastic] job {self._request.job}: {text}", flush=True)
            self._said = text


def _nodes(now: float) -> list[RayNode]:
    """The live nodes of the cluster.

    Ray has no public way to ask which nodes are being drained; Ray Train asks in the same way.
    """
    draining = cluster_state.get_draining_nodes()
    return [
        RayNode(node["NodeID"], node["Resources"], _leaves_at(draining.get(node["NodeID"]), now))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _leaves_at(deadline_ms: int | None, now: float) -> float | None:
    """Ray's deadline, in milliseconds since 1970 or 0 for none, on our clock."""
    if deadline_ms is None:
        return None
    return now + deadline_ms / 1000 - time.time() if deadline_ms else math.inf


def _error(ends: Iterable[NodeEnd], finish: Finish) -> TorchElasticError | None:
    """The error of a node that ended as the job did."""
    if finish.exitcode == EXIT_OK:
        return None
    found = [end.error for end in ends if end.exitcode == finish.exitcode and end.error]
    return found[0] if found else TorchElasticError(finish.why)


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]
