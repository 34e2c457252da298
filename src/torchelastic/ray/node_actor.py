"""The actor on a Ray node: it holds the agent of that node, a process of its own.

The agent dies with the actor, and the actor with its raylet. A lost controller does not matter to
it; only when Ray has none for good, because the driver is gone, does the agent leave the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from torchelastic import env
from torchelastic.config import Entry, LaunchConfig, format_endpoint
from torchelastic.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, TorchElasticError
from torchelastic.events import job_registry
from torchelastic.launcher.launch_job import AgentProcess
from torchelastic.ray.placement_plan import Phase
from torchelastic.system import linux
from torchelastic.transport.credentials import VARIABLE as SECRET

logger = logging.getLogger(__name__)

NAMESPACE = "torchelastic"
#: Seconds between two looks whether there is a controller, and without one until the agent leaves.
LOOK, CONTROLLER_LOST = 2.0, 15.0


@dataclass(frozen=True)
class Call:
    """The entry that the workers run, as the driver sends it."""

    entry: Entry
    #: A pickled function and its arguments, for an entry of kind `function`.
    function: bytes = b""
    #: The driver's working directory.
    directory: str = ""


@dataclass(frozen=True)
class AgentState:
    """The state of an actor and its agent, as the actor reports it."""

    node: str
    endpoint: str
    phase: Phase = "placed"
    endpoints: tuple[str, ...] = ()
    generation: int = -1
    exitcode: int | None = None


@dataclass(frozen=True)
class NodeEnd:
    """How the job ended on one node."""

    exitcode: int
    error: TorchElasticError | None = None
    #: Of the last world that the agent was in; -1: it was in none.
    generation: int = -1
    #: What a function returned, by global rank.
    results: Mapping[int, Any] = field(default_factory=dict)


class NodeActor:
    """Runs the agent of one node, once."""

    def __init__(self, job: str, controller: str, secret: str) -> None:
        self._job = job
        self._controller = controller
        self._secret = secret
        address = ray.util.get_node_ip_address()
        # Bound, so that nobody else gets the port, until the agent listens there.
        self._port = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._port.bind((address, 0))
        endpoint = format_endpoint(address, self._port.getsockname()[1])
        node = ray.get_runtime_context().get_node_id()
        self._state = AgentState(node, endpoint)
        self._agent: AgentProcess | None = None
        self._progress: _Progress | None = None
        self._end: NodeEnd | None = None
        self._leave_at_once = False
        self._lock = threading.Lock()
        #: The agent leaves when this file exists, within the seconds in it.
        self._notice = Path()
        threading.Thread(target=self._look_for_controller, daemon=True).start()

    def __repr__(self) -> str:
        return f"torchelastic {self._job}"

    def state(self) -> AgentState:
        """Return what is known of the agent now."""
        newest = self._progress.generation() if self._progress is not None else -1
        with self._lock:
            if newest > self._state.generation:
                self._state = replace(self._state, generation=newest)
            return self._state

    def start(self, config: Mapping[str, Any], call: Call, endpoints: tuple[str, ...]) -> None:
        """Start the agent; told again by another controller, do nothing."""
        with self._lock:
            if self._state.phase != "placed":
                return
            directory = tempfile.TemporaryDirectory(prefix="torchelastic_ray_")
            self._notice = Path(directory.name) / "notice"
            self._state = replace(self._state, phase="running", endpoints=endpoints)
        # The thread that starts the agent must live as long as it does.
        threading.Thread(target=self._run, args=(config, call, directory), daemon=True).start()

    def leave(self, why: str, seconds: float | None = None) -> None:
        """Ask the agent to leave the job, within some seconds or in its own time."""
        with self._lock:
            if self._state.phase != "running":
                return
            self._state = replace(self._state, phase="leaving")
            print(f"[torchelastic] this node leaves the job: {why}", file=sys.stderr)
            if seconds is not None:
                written = self._notice.with_suffix(".new")
                written.write_text(f"{seconds:.1f} {why}")
                written.replace(self._notice)
            elif self._agent is not None:
                self._agent.signal(signal.SIGTERM)
            else:
                self._leave_at_once = True

    def end(self) -> NodeEnd | None:
        """Return how the job ended here; None: it has not."""
        return self._end

    def _run(
        self, config: Mapping[str, Any], call: Call, directory: tempfile.TemporaryDirectory[str]
    ) -> None:
        with directory as name:
            try:
                self._end = self._run_agent(config, call, Path(name))
            except ConfigError as error:
                print(f"[torchelastic] {error}", file=sys.stderr)
                self._end = NodeEnd(EXIT_USAGE, error)
            except Exception as error:
                logger.exception("The agent could not be started.")
                self._end = NodeEnd(EXIT_FAILED, TorchElasticError(str(error)))
        with self._lock:
            newest = max(self._state.generation, self._end.generation)
            self._state = replace(
                self._state, phase="ended", exitcode=self._end.exitcode, generation=newest
            )

    def _run_agent(self, config: Mapping[str, Any], call: Call, directory: Path) -> NodeEnd:
        address, _, _ = self._state.endpoint.rpartition(":")
        complete = LaunchConfig.from_json(
            {
                **config,
                "rdzv_endpoint": ",".join(self._state.endpoints),
                # Several Ray nodes may share an address: without it, each would take any port.
                "rdzv_configs": {**config["rdzv_configs"], "own_endpoint": self._state.endpoint},
                "local_addr": address.strip("[]"),
                "incarnation": self._state.node,
                "scheduled": True,  # an actor that Ray starts late must not run the job again
                "preemption": _with_file(config["preemption"], self._notice),
            }
        )
        entry = self._entry(call, directory)
        environ = _environment(complete) | {SECRET: self._secret}
        self._port.close()
        agent = AgentProcess(complete, entry, directory, environ)
        self._progress = _Progress(self._job, agent.pid)
        with self._lock:
            self._agent = agent
            if self._leave_at_once:
                agent.signal(signal.SIGTERM)
        ended = agent.wait()
        error = None if ended.exitcode == EXIT_OK else ended.error(call.entry.name)
        generation = ended.world.generation if ended.place is not None and ended.world else -1
        return NodeEnd(ended.exitcode, error, generation, ended.results)

    def _entry(self, call: Call, directory: Path) -> Entry:
        """Prepare the working directory and return what the workers run."""
        if not ray.get_runtime_context().runtime_env.get("working_dir"):
            try:
                os.chdir(call.directory)
            except OSError as error:
                raise ConfigError(
                    f"The driver's working directory {call.directory} does not exist on this node "
                    f"({error.strerror}): set working_dir in Ray's runtime_env, or use a directory "
                    "that all nodes share."
                ) from error
        if call.entry.kind == "script" and not os.path.exists(call.entry.target):
            raise ConfigError(
                f"{call.entry.target} does not exist in {os.getcwd()} on this node: set "
                "working_dir in Ray's runtime_env, or use a path that all nodes share."
            )
        if call.entry.kind != "function":
            return call.entry
        path = directory / "call.pickle"
        preparation = {"sys_path": sys.path, "dir": os.getcwd()}
        path.write_bytes(pickle.dumps(preparation) + call.function)
        return replace(call.entry, target=str(path))

    def _look_for_controller(self) -> None:
        """Leave and end when the job has had no controller for some time."""
        missing_since: float | None = None
        while True:
            time.sleep(LOOK)
            if _has_controller(self._controller):
                missing_since = None
                continue
            missing_since = missing_since or time.monotonic()
            if time.monotonic() - missing_since < CONTROLLER_LOST:
                continue
            self.leave("the driver of the job is gone")
            if self._state.phase in ("placed", "ended"):
                ray.kill(ray.get_runtime_context().current_actor)
                return


def _with_file(sources: str, notice: Path) -> str:
    """Add a file to the sources of preemption notices."""
    return f"file={notice}" if sources == "none" else f"{sources},file={notice}"


def _has_controller(name: str) -> bool:
    """Return whether Ray has the controller, or is restarting it, or cannot be asked."""
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:  # there is no such actor, and will not be again
        return False
    except Exception as error:  # Ray's own control store is out of reach: training goes on
        logger.debug("Cannot look for %s: %s", name, error)
    return True


def _environment(config: LaunchConfig) -> dict[str, str]:
    """Return the agent's environment: the actor's, without a number of threads that is Ray's."""
    environ = env.snapshot()
    chosen = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    if config.nproc_per_node > 1 and "OMP_NUM_THREADS" not in chosen:
        # Ray sets it to all CPUs of the actor, which is right for one worker only.
        environ.pop("OMP_NUM_THREADS", None)
    return environ


class _Progress:
    """How far the agent is, from its event log."""

    def __init__(self, job: str, guard: int) -> None:
        self._job = job
        self._guard = guard
        self._path: Path | None = None
        self._read = 0
        self._newest = -1

    def generation(self) -> int:
        """Return the generation of the newest world that the agent has seen; -1: none yet."""
        if self._path is None:
            agents = linux.children(self._guard)
            known = [one for one in job_registry.agents_of(self._job) if one.pid in agents]
            self._path = known[0].events if known else None
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
                self._read += len(whole) + 1 if whole else 0
                for line in whole.splitlines():
                    record = json.loads(line)
                    if record["type"] == "world-formed":
                        self._newest = int(record["generation"])
        return self._newest
