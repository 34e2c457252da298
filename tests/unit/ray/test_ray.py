"""Jobs on Ray: the plan, and what the driver does."""

import math
import signal
from types import SimpleNamespace

import pytest

from torchelastic.errors import ConfigError
from torchelastic.ray import ray_job
from torchelastic.ray.placement_plan import (
    ENDING,
    FOUNDING,
    MOST_STARTS,
    PLACEMENT,
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

NOW = 1000.0
WANTED = Wanted(2, 3, {"CPU": 2, "GPU": 1})


def node(name: str, leaves_at: float | None = None, **resources: float) -> RayNode:
    return RayNode(name, {"CPU": 2, "GPU": 1, **resources}, leaves_at)


def agent(name: str, phase: str, **more) -> NodeAgent:
    """On the node of the same name, at the endpoint of the same name."""
    more = {"since": NOW - 10, "endpoint": f"{name}:1", "node": name, **more}
    return NodeAgent(name, phase=phase, **more)


A, B, C, D = map(node, "abcd")
RUNNING = [agent(name, "running", generation=4) for name in "abc"]


@pytest.mark.parametrize(
    ("nodes", "agents", "wanted", "actions"),
    [
        pytest.param([], [], WANTED, [], id="an empty cluster: wait"),
        pytest.param([A, B, C, D], [], WANTED, [*map(Place, "abc")], id="no more than the maximum"),
        pytest.param([A, node("b", GPU=0)], [], WANTED, [Place("a")], id="too few resources"),
        pytest.param([A, node("b", math.inf)], [], WANTED, [Place("a")], id="one that goes"),
        pytest.param([A], [agent("a", "placed")], WANTED, [], id="fewer than the minimum: wait"),
        pytest.param(
            [A, B],
            [agent("a", "placed"), agent("b", "placed")],
            WANTED,
            [Start("a", ("a:1", "b:1")), Start("b", ("a:1", "b:1"))],
            id="begin with the minimum",
        ),
        pytest.param(
            [A, B, C],
            [agent("a", "placed"), agent("b", "placed"), agent("c", "pending", since=NOW - 1)],
            WANTED,
            [],
            id="wait a little for one that is being placed",
        ),
        pytest.param(
            [A, B, C],
            [
                *(agent(name, "placed") for name in "ab"),
                agent("c", "pending", since=NOW - FOUNDING - 1),
            ],
            WANTED,
            [Start("a", ("a:1", "b:1")), Start("b", ("a:1", "b:1"))],
            id="but not longer",
        ),
        pytest.param([A, B, C], RUNNING, WANTED, [], id="all is well"),
        pytest.param([A, B, C, D], RUNNING, WANTED, [], id="more nodes than wanted"),
        pytest.param(
            [A, B, D], RUNNING, WANTED, [Remove("c", "its node is gone"), Place("d")], id="lost"
        ),
        pytest.param(
            [A, B, D],
            [*RUNNING[:2], agent("d", "placed")],
            WANTED,
            [Start("d", ("a:1", "b:1", "d:1"))],
            id="a newcomer is told of those that run, and listens at its own endpoint",
        ),
        pytest.param(
            [A, B, C, D],
            [agent("a", "running"), RUNNING[1], RUNNING[2], agent("d", "placed")],
            Wanted(2, 4),
            [Start("d", ("b:1", "c:1", "d:1"))],
            id="of those that are in the job",
        ),
        pytest.param(
            [A, B, node("c", NOW + 30), D],
            RUNNING,
            WANTED,
            [Leave("c", "Ray drains the node", 30.0), Place("d")],
            id="a drained node leaves, and a spare node takes its place at once",
        ),
        pytest.param(
            [A, B, node("c", NOW + 30)],
            [*RUNNING[:2], agent("c", "leaving")],
            WANTED,
            [],
            id="it is asked once",
        ),
        pytest.param(
            [A, node("b", math.inf)],
            [agent("a", "placed"), agent("b", "placed")],
            WANTED,
            [Remove("b", "its node goes away")],
            id="drained before its agent has started",
        ),
        pytest.param(
            [A, B, C],
            [*RUNNING[:2], agent("c", "lost", since=NOW - 0.5, removed=True)],
            WANTED,
            [],
            id="after a failure a node rests",
        ),
        pytest.param(
            [A, B, C],
            [*RUNNING[:2], agent("c", "lost", since=NOW - 2, removed=True)],
            WANTED,
            [Place("c")],
            id="and gets another agent",
        ),
        pytest.param(
            [A, B, C],
            [*RUNNING[:2], *(agent("c", "lost", since=NOW - 2, removed=True) for _ in range(3))],
            WANTED,
            [],
            id="later and later",
        ),
        pytest.param(
            [A, B, C],
            [*RUNNING[:2], agent("c", "ended", exitcode=64)],
            WANTED,
            [Remove("c", "its agent has ended")],
            id="a node that refuses the job is not asked again",
        ),
        pytest.param(
            [A, B],
            [agent(name, "ended", exitcode=64, removed=True) for name in "ab"],
            WANTED,
            [Finish(64, "No node can run the job; their logs say why.")],
            id="all refuse",
        ),
        pytest.param(
            [A, B],
            [agent("a", "ended", exitcode=1, removed=True), agent("b", "placed")],
            WANTED,
            [Place("a")],
            id="an agent that fails before it has a world is tried again",
        ),
        pytest.param(
            [A],
            [agent("a", "ended", exitcode=1, since=0, removed=True) for _ in range(MOST_STARTS)],
            WANTED,
            [Finish(1, "No node can run the job; their logs say why.")],
            id="but not forever",
        ),
        pytest.param(
            [A],
            [agent("a", "ended", exitcode=64, generation=0, removed=True)],
            WANTED,
            [Finish(64, "the job failed (exit code 64)")],
            id="a script that no other start can help",
        ),
        pytest.param(
            [A, B, C],
            [*RUNNING[:2], agent("c", "ended", exitcode=171, removed=True)],
            WANTED,
            [Place("c")],
            id="one that lost the others joins them again",
        ),
        pytest.param(
            [A, B, C],
            [*RUNNING[:2], agent("c", "pending", since=NOW - PLACEMENT - 1)],
            WANTED,
            [Remove("c", "Ray could not place it within 30 s")],
            id="resources that somebody else has",
        ),
        pytest.param(
            [B, C],
            [agent("b", "running", endpoints=("a:1", "b:1")), agent("c", "placed")],
            WANTED,
            [Remove("b", "every agent that it was to meet is gone")],
            id="the one it was to begin the job with is lost",
        ),
        pytest.param(
            [B],
            [agent("b", "running", endpoints=("a:1", "b:1"), generation=0)],
            WANTED,
            [],
            id="one that has a world goes on without it",
        ),
        pytest.param(
            [A, B, C],
            [*RUNNING[:2], agent("c", "ended", exitcode=0, since=NOW)],
            WANTED,
            [],
            id="complete: the others end by themselves, and the result stays",
        ),
        pytest.param(
            [A, B, D],
            [RUNNING[0], agent("c", "ended", exitcode=0, since=NOW - ENDING - 1, removed=True)],
            WANTED,
            [Remove("a", "it has not ended with the job")],
            id="but not forever; and nobody is added",
        ),
        pytest.param(
            [A, B],
            [agent(name, "ended", exitcode=0, removed=True) for name in "ab"],
            WANTED,
            [Finish(0, "training is complete")],
            id="complete",
        ),
        pytest.param(
            [A, B],
            [
                agent("a", "ended", exitcode=1, generation=2, removed=True),
                agent("b", "lost", removed=True),
            ],
            WANTED,
            [Finish(1, "the job failed (exit code 1), 1 lost")],
            id="failed",
        ),
        pytest.param(
            [A, B, C],
            [RUNNING[0], agent("b", "leaving"), agent("c", "pending")],
            Wanted(2, 3, stop="SIGTERM"),
            [Leave("a", "SIGTERM"), Remove("c", "the job has ended")],
            id="stopped: all leave",
        ),
        pytest.param(
            [A],
            [agent("a", "ended", exitcode=143, removed=True)],
            Wanted(2, 3, stop="SIGTERM"),
            [Finish(None, "SIGTERM")],
            id="stopped: all have left",
        ),
        pytest.param(
            [],
            [],
            Wanted(2, 3, {"GPU": 1}, wait_for_nodes=60, since=NOW - 61),
            [Finish(170, "Fewer than 2 Ray nodes with {GPU: 1} for 60 s.")],
            id="nobody comes",
        ),
    ],
)
def test_plan(nodes, agents, wanted, actions):
    assert plan(nodes, agents, wanted, NOW) == actions


def test_at_most_one_agent_on_a_node_and_never_more_than_wanted():
    """Performing the plan adds up in any phases of the agents."""
    phases = ("pending", "placed", "running", "leaving", "ended", "lost")
    for first in phases:
        for second in phases:
            agents = [agent("a", first, removed=True), agent("b", second, removed=True)]
            placed = [
                one.node
                for one in plan([A, B, C, D], agents, WANTED, NOW)
                if isinstance(one, Place)
            ]
            staying = [one.node for one in agents if one.is_live and one.phase != "leaving"]
            assert len(placed) + len(staying) <= WANTED.max_nodes
            assert not {one.node for one in agents if one.is_live} & set(placed)


@pytest.mark.parametrize(
    ("agents", "said"),
    [
        ([], "waiting for 2:3 nodes"),
        (
            [*RUNNING[:2], agent("c", "placed"), agent("d", "lost")],
            "2 of 2:3 nodes in the job, generation 4, 1 starting, 1 lost",
        ),
        ([agent("a", "ended", exitcode=0)], "training is complete"),
    ],
)
def test_the_state_in_one_sentence(agents, said):
    assert sentence(agents, WANTED) == said


# --- the driver -----------------------------------------------------------------------------------


pytestmark = pytest.mark.needs("ray")


@pytest.fixture
def cluster(monkeypatch):
    """A Ray without a cluster: actors by name, and what was asked of the autoscaler."""
    import ray
    from ray.autoscaler import sdk

    made = SimpleNamespace(actors={}, asked=[], killed=[])

    def get_actor(name, namespace):
        if name not in made.actors:
            raise ValueError(name)
        return made.actors[name]

    def named(all_namespaces):
        return [{"name": name, "namespace": "torchelastic"} for name in made.actors]

    monkeypatch.setattr(ray.util, "list_named_actors", named)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", made.killed.append)
    monkeypatch.setattr(sdk, "request_resources", lambda bundles: made.asked.append(bundles))
    monkeypatch.setattr(ray_job.time, "sleep", lambda seconds: made.actors.clear())
    return made


def init_failed():
    from ray.exceptions import ActorDiedError

    error = ActorDiedError()
    error.error_msg = "The actor died because of ...\nModuleNotFoundError: No module named 'x'"
    error._actor_init_failed = True
    return error


def test_a_driver_that_is_interrupted_asks_for_no_more_nodes(cluster):
    ray_job._remove_actors("job")
    assert cluster.asked == [[]]


def test_a_controller_that_cannot_start_is_not_started_for_ever(cluster, monkeypatch):
    """As on a cluster without torchelastic: the driver went round and round, silently."""
    import ray

    starts = []
    follow = SimpleNamespace(remote=lambda: "ref")

    def controller(request):
        starts.append(request)
        return SimpleNamespace(follow=follow)

    def get(ref):
        raise init_failed()

    monkeypatch.setattr(ray_job, "_controller", controller)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ConfigError, match=r"No module named 'x'\): install the same torchelastic"):
        ray_job._follow(SimpleNamespace(job="job"), [])
    assert len(starts) == ray_job.MOST_STARTS


def test_a_name_that_a_running_job_has_is_refused(cluster):
    cluster.actors["job/controller"] = "controller"
    with pytest.raises(ConfigError, match="runs on this Ray cluster: choose another name"):
        ray_job._wait_for_leftovers("job", 30.0)
    assert not cluster.killed


def test_a_new_driver_waits_for_the_nodes_of_one_that_was_killed(cluster, capsys):
    """They have another secret: a node that joined them would be refused for ever."""
    cluster.actors["job/node/1/2"] = "node"
    ray_job._wait_for_leftovers("job", 30.0)
    assert not cluster.actors
    assert "waiting for the last nodes of job job to leave" in capsys.readouterr().err


@pytest.mark.parametrize("exitcode", [0, None])
def test_training_that_is_complete_when_ctrl_c_comes_is_complete(cluster, monkeypatch, exitcode):
    import ray

    from torchelastic.config import LaunchConfig
    from torchelastic.ray.controller import JobEnd

    def follow(request, received):
        received.append(signal.SIGINT)
        return JobEnd(exitcode, "", {}, None, {})

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_job, "_follow", follow)
    config = LaunchConfig(1, 1, 1, rdzv_endpoint=ray_job.LATER)
    if exitcode == 0:
        assert ray_job.run_on_ray(config, "train.py").exitcode == 0
    else:
        with pytest.raises(KeyboardInterrupt):
            ray_job.run_on_ray(config, "train.py")
