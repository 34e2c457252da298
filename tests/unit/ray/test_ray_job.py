"""What a driver does before and after a job, and about actors that cannot start."""

import signal
from types import SimpleNamespace

import pytest

from torchelastic.errors import EXIT_FAILED, ConfigError
from torchelastic.ray import ray_job

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


def test_an_actor_that_cannot_start_counts_as_a_failed_start(cluster):
    from torchelastic.ray.controller import Controller
    from torchelastic.ray.placement_plan import NodeAgent, Wanted

    made = Controller(SimpleNamespace(job="job", wanted=Wanted(1, 1)))
    made._agents["a"] = NodeAgent("a", "node-a", "pending", 0.0)
    made._lost("a", init_failed(), 1.0)
    assert (made._agents["a"].phase, made._agents["a"].exitcode) == ("lost", EXIT_FAILED)
    assert "No module named 'x'" in str(made._ends["a"].error)


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
