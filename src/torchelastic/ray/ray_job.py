"""`torchelastic.ray.run`: run a job on a Ray cluster and wait for its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchelastic.config import Entry, LaunchConfig, parse_nnodes
from torchelastic.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_SIGNAL_BASE,
    ConfigError,
    JobInterrupted,
    TorchElasticError,
)
from torchelastic.launcher.launch_job import completed, function_name
from torchelastic.ray.placement_plan import Wanted

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from torchelastic.ray.controller import JobEnd, JobRequest
    from torchelastic.ray.node_actor import Call

#: Set for each node when it starts.
_OF_A_NODE = ("run_id", "rdzv_endpoint", "rdzv_secret_file", "local_addr", "node_rank")
#: Stands for the endpoints that are known when the first nodes are placed.
LATER = "127.0.0.1:1"
#: How often in a row a controller may fail to start.
MOST_STARTS = 5


@dataclass(frozen=True)
class Result:
    """How a job on Ray ended."""

    #: 0: the training is complete.
    exitcode: int
    reason: str
    #: By Ray node id, the last exit code of the agent there; None: the node was lost.
    nodes: Mapping[str, int | None] = field(default_factory=dict)
    #: What a function returned, by global rank.
    results: Mapping[int, Any] = field(default_factory=dict)
    error: TorchElasticError | None = None

    @property
    def first_failure(self) -> ProcessFailure | None:
        """The failure that ended the job, if a worker's failure did."""
        from torchelastic.launcher.child_failed import ChildFailedError  # imports torch

        if not isinstance(self.error, ChildFailedError):
            return None
        return self.error.get_first_failure()[1]


def run(
    entrypoint: str | Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    nnodes: str | int = 1,
    nproc_per_node: int | None = None,
    resources_per_node: Mapping[str, float] | None = None,
    name: str = "",
    check: bool = True,
    **settings: Any,
) -> Result:
    """Run a script or a function in every worker of a job on the nodes of a Ray cluster.

    `nnodes` is `N` or `MIN:MAX`. `resources_per_node` (default: one CPU per worker) is what Ray
    reserves on each node; `nproc_per_node` defaults to its GPUs, or 1. `settings` are fields of
    `LaunchConfig`. Connects to Ray with `ray.init()` unless the program is connected.

    Raises what `elastic_launch` raises if the training is not complete at the end; with
    `check=False` the result tells.
    """
    if given := [key for key in _OF_A_NODE if key in settings]:
        raise ConfigError(f"{given[0]} is chosen by torchelastic.ray.run: leave it out.")
    least, most = parse_nnodes(str(nnodes))
    resources = dict(resources_per_node or {})
    workers = nproc_per_node or workers_of(resources)
    config = LaunchConfig(least, most, workers, run_id=name, rdzv_endpoint=LATER, **settings)
    result = run_on_ray(config, entrypoint, args, resources)
    if check and result.error is not None:
        raise result.error
    return result


def workers_of(resources: Mapping[str, float]) -> int:
    """Return the default number of workers on a node: one for each of its GPUs, or one."""
    return int(resources.get("GPU", 0)) or 1


def run_on_ray(
    config: LaunchConfig,
    entrypoint: str | Callable[..., Any] | Entry,
    args: Sequence[Any] = (),
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
) -> Result:
    """Run a job to its end; `config` has any endpoint. Raises KeyboardInterrupt after Ctrl-C."""
    ray = _ray()
    if "/" in config.run_id:
        raise ConfigError(
            f"'{config.run_id}' is not a valid name of a job on Ray: leave out the slash."
        )
    config = completed(replace(config, run_id=config.run_id or f"ray-{secrets.token_hex(4)}"))
    request = _request(config, _call(entrypoint, args), resources)
    if not ray.is_initialized():
        try:
            ray.init(address)
        except ConnectionError as error:
            raise ConfigError(
                f"No Ray cluster found ({error}): start one with ray start --head, or give its "
                "address."
            ) from error
    _wait_for_leftovers(request.job, config.shutdown_timeout)
    with _signals() as received:
        ended = _follow(request, received)
    if received and received[0] == signal.SIGINT and ended.exitcode != EXIT_OK:
        raise KeyboardInterrupt
    return _result(ended, received)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed: pip install 'ray[default]'.") from error
    return ray


def _request(config: LaunchConfig, call: Call, resources: Mapping[str, float] | None) -> JobRequest:
    from torchelastic.ray.controller import JobRequest

    return JobRequest(
        job=config.run_id,
        config=config.to_json(),
        call=call,
        wanted=Wanted(
            config.min_nodes,
            config.max_nodes,
            dict(resources or {"CPU": float(config.nproc_per_node)}),
            wait_for_nodes=config.wait_for_nodes,
        ),
        secret=secrets.token_hex(32),
    )


def _call(entrypoint: str | Callable[..., Any] | Entry, args: Sequence[Any]) -> Call:
    from ray import cloudpickle

    from torchelastic.ray.node_actor import Call

    here = os.getcwd()
    if isinstance(entrypoint, Entry):
        return Call(entrypoint, directory=here)
    if isinstance(entrypoint, str):
        return Call(Entry("script", entrypoint, tuple(map(str, args))), directory=here)
    function = cloudpickle.dumps((entrypoint, tuple(args)))
    return Call(Entry("function", function_name(entrypoint)), function, here)


def _wait_for_leftovers(job: str, shutdown_timeout: float) -> None:
    """Refuse a job that runs. Wait for the agents of a driver that was killed: they leave by
    themselves, and have another secret."""
    import ray

    from torchelastic.ray.controller import controller_name, node_actors
    from torchelastic.ray.node_actor import CONTROLLER_LOST, NAMESPACE

    try:
        ray.get_actor(controller_name(job), NAMESPACE)
    except ValueError:
        pass  # as it should be
    else:
        raise ConfigError(
            f"A job with the name '{job}' runs on this Ray cluster: choose another name, or wait."
        )
    deadline = time.monotonic() + CONTROLLER_LOST + 2 * shutdown_timeout
    if node_actors(job):
        print(f"[torchelastic] waiting for the last nodes of job {job} to leave", file=sys.stderr)
    while node_actors(job) and time.monotonic() < deadline:
        time.sleep(0.5)
    _remove_actors(job)


def _follow(request: JobRequest, received: Sequence[int]) -> JobEnd:
    """Start a controller and wait for the end of the job; find or start another if it is lost."""
    import ray
    from ray.exceptions import ActorDiedError

    failures = 0
    try:
        while True:
            controller = _controller(request)
            ref = controller.follow.remote()
            stopped = False
            try:
                while not ray.wait([ref], timeout=0.5)[0]:
                    if received and not stopped:
                        name = signal.Signals(received[0]).name
                        controller.stop.remote(f"the driver received {name}")
                        stopped = True
                return ray.get(ref)  # type: ignore[no-any-return]
            except ActorDiedError as error:
                # For good. Agents that run go on, and the next controller finds them.
                failures = failures + 1 if error.actor_init_failed else 0
                if failures == MOST_STARTS:
                    raise ConfigError(cannot_start("controller", error)) from None
                time.sleep(1.0)
    finally:
        _remove_actors(request.job)


def cannot_start(actor: str, error: Exception) -> str:
    """Return the sentence about an actor whose code fails before it does anything."""
    why = str(error).strip().rpartition("\n")[2]
    return (
        f"The job's {actor} cannot start on the Ray cluster ({why}): install the same torchelastic "
        "on every node, or name it in Ray's runtime_env."
    )


def _controller(request: JobRequest) -> Any:
    import ray

    from torchelastic.ray.controller import Controller, controller_name
    from torchelastic.ray.node_actor import NAMESPACE

    actor: Any = ray.remote(Controller)
    return actor.options(
        name=controller_name(request.job),
        namespace=NAMESPACE,
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=4,
        num_cpus=0,
    ).remote(request)


def _remove_actors(job: str) -> None:
    import ray
    from ray.autoscaler.sdk import request_resources

    from torchelastic.ray.controller import controller_name, node_actors
    from torchelastic.ray.node_actor import NAMESPACE

    for name in [controller_name(job), *node_actors(job)]:
        with contextlib.suppress(ValueError):  # gone already
            ray.kill(ray.get_actor(name, NAMESPACE))
    # A controller that is killed does not, and the autoscaler would keep the nodes.
    request_resources(bundles=[])


def _result(ended: JobEnd, received: Sequence[int]) -> Result:
    error, code = ended.error, ended.exitcode
    if code is None:
        code = EXIT_SIGNAL_BASE + received[0] if received else EXIT_FAILED
        error = JobInterrupted(ended.reason)
    return Result(code, ended.reason, ended.nodes, dict(sorted(ended.results.items())), error)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of ending by them; a second one ends the program.

    Only in the main thread, where Python allows it.
    """
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signum)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
