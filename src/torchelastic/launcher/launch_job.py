"""`elastic_launch`: run a job from Python, with the API of torch's launcher.

The agent runs in a separate process, exactly as under `torchelastic run`: it adopts and reaps every
orphan of the job, which must not happen in the caller's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from torchelastic.agent import failure_report
from torchelastic.config import Entry, LaunchConfig, default_run_id
from torchelastic.errors import (
    EXIT_NOT_ENOUGH_NODES,
    EXIT_OK,
    EXIT_RENDEZVOUS_LOST,
    EXIT_SIGNAL_BASE,
    FAILED,
    ConfigError,
    JobInterrupted,
    NotEnoughNodes,
    RendezvousLost,
    TorchElasticError,
)
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.backend_parameters import (
    check_backend,
    fields_from_conf,
    keys_without_meaning,
)
from torchelastic.rendezvous.world import World, WorldNode
from torchelastic.worker.bootstrap import write_call

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

#: Unlike `-m`, does not put the working directory on the agent's path, where the user's `json.py`
#: would replace Python's; and finds this package where the caller found it.
_AGENT = """\
import sys
sys.path.pop(0)
sys.path.append(sys.argv.pop(1))
from torchelastic.agent.__main__ import main
sys.exit(main())
"""


class elastic_launch:
    """Run a function or a program on every worker of an elastic job.

    `elastic_launch(config, function)(*args)` returns the results of the function by global rank,
    for the workers of this node. `function`, `args` and the result must be picklable, as with
    multiprocessing's spawn; functions in `__main__` work the same way.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]
) -> dict[int, Any]:
    """Run this node's part of a job in an agent process; results by global rank.

    Raises `ChildFailedError` if workers failed, `NotEnoughNodes`, `RendezvousLost` or
    `JobInterrupted` if the job could not continue, `KeyboardInterrupt` on Ctrl-C.
    """
    ended = run_agent(config, entrypoint, args)
    if ended.exitcode != EXIT_OK:
        raise ended.error(entrypoint_name(entrypoint, args))
    return ended.results


@dataclass(frozen=True)
class Ended:
    """The end of the job on this node."""

    exitcode: int
    reason: str
    #: The last world this node has seen, and its entry there.
    world: World | None
    place: WorldNode | None
    results: dict[int, Any]

    @property
    def failures(self) -> dict[int, ProcessFailure]:
        """Failures by global rank, the first failure of the job first."""
        from torchelastic.launcher.child_failed import process_failure  # imports torch

        return {item.rank: process_failure(item) for item in self._failed()}

    def _failed(self) -> list[Failure]:
        if self.exitcode not in FAILED or self.world is None:
            return []
        found = (self.world.cause, *self.world.consequences)
        return [item for item in found if item is not None and not item.is_node]

    def _first(self) -> Failure | None:
        """The failure of a worker that caused the others; if unknown, the earliest."""
        failed = self._failed()
        cause = self.world.cause if self.world is not None else None
        return (
            cause if cause in failed else min(failed, key=lambda one: one.wall_time, default=None)
        )

    def told(self, name: str) -> str:
        """Why the job ended, with the block of text that names every failure."""
        first = self._first()
        if self.world is None or first is None:
            return self.reason
        others = [one for one in self._failed() if one is not first]
        title = f"{name} FAILED: {failure_report.ending(self.world)}"
        return failure_report.failures_block(title, first, others)

    def error(self, name: str) -> TorchElasticError:
        """The exception for this end."""
        if (first := self._first()) is not None:
            from torchelastic.launcher.child_failed import ChildFailedError

            text = self.told(name)
            return ChildFailedError(name, self.failures, first=first.rank, text=text)
        if self.exitcode == EXIT_NOT_ENOUGH_NODES:
            return NotEnoughNodes(self.reason)
        if self.exitcode == EXIT_RENDEZVOUS_LOST:
            return RendezvousLost(self.reason)
        if self.exitcode > EXIT_SIGNAL_BASE:
            return JobInterrupted(self.reason)
        return TorchElasticError(self.reason)


def run_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[Any]
) -> Ended:
    """Run this node's part of a job and return how it ended, without raising for failures."""
    config = completed(config)
    with private_directory() as directory:
        return run_entry(config, make_entry(entrypoint, args, directory), directory)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a directory for the files of one agent process."""
    with tempfile.TemporaryDirectory(prefix="torchelastic_launch_") as name:
        yield Path(name)


def run_entry(config: LaunchConfig, entry: Entry, directory: Path) -> Ended:
    """Run an entry in an agent process, with its files in `directory`."""
    with _shown_by_python() as streams:
        agent = AgentProcess(config, entry, directory, streams=streams)
        with _handed_on(agent, config.signals_to_handle) as received:
            ended = agent.wait()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return ended


class AgentProcess:
    """An agent in a process of its own. It dies with the thread that starts it."""

    def __init__(
        self,
        config: LaunchConfig,
        entry: Entry,
        directory: Path,
        environ: Mapping[str, str] | None = None,
        streams: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Start it. `directory` is private to it and stays until it has ended; `environ` and
        `streams` (stdout and stderr) replace this process's own."""
        request, self._outcome = directory / "request.json", directory / "outcome.json"
        asked = {
            "parent": os.getpid(),
            "config": config.to_json(),
            "entry": dataclasses.asdict(entry),
        }
        request.write_text(json.dumps(asked))
        package_root = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", _AGENT, package_root, str(request), str(self._outcome)]
        # In a new session: Ctrl-C reaches it only through us, once.
        out, err = streams
        self._process = subprocess.Popen(
            command, start_new_session=True, env=environ, stdout=out, stderr=err
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, signum: int) -> None:
        """Send the agent a signal, if it still runs."""
        self._process.send_signal(signum)

    def wait(self) -> Ended:
        """Wait for the end of the job on this node; if the wait is interrupted, end it."""
        try:
            self._process.wait()
        finally:
            if self._process.returncode is None:  # a signal handler of the caller's raised
                self._process.terminate()
                self._process.wait()
        code = self._process.returncode
        said = json.loads(self._outcome.read_text()) if self._outcome.exists() else {}
        return _ended(code if code >= 0 else EXIT_SIGNAL_BASE - code, said)


def completed(config: LaunchConfig) -> LaunchConfig:
    """Return the config with the defaults that the command line would fill in."""
    if not isinstance(config, LaunchConfig):
        raise ConfigError(
            f"{type(config).__module__}.{type(config).__name__} is not torchelastic.LaunchConfig: "
            "use torchelastic.LaunchConfig, which has the same fields."
        )
    check_backend(config.rdzv_backend, config.rdzv_configs)
    changes: dict[str, Any] = {}
    for name, value in fields_from_conf(config.rdzv_configs).items():
        if getattr(config, name) == _DEFAULTS[name]:  # a field set by hand counts more than a key
            changes[name] = value
    if not config.run_id:
        changes["run_id"] = default_run_id(config.max_nodes, config.rdzv_endpoint)
    if ignored := keys_without_meaning(config.rdzv_configs, config.rdzv_backend):
        note = f"Ignored unknown rdzv_configs: {', '.join(ignored)}."
        changes["notes"] = (*config.notes, note)
    return dataclasses.replace(config, **changes)


_DEFAULTS = {item.name: item.default for item in dataclasses.fields(LaunchConfig)}


def make_entry(entrypoint: Callable[..., Any] | str, args: Sequence[Any], directory: Path) -> Entry:
    """Return the entry that the workers run; pickles a function into `directory`."""
    if isinstance(entrypoint, str):
        return _program(entrypoint, [str(arg) for arg in args])
    return _function_entry(directory / "call.pickle", entrypoint, args)


def _program(program: str, args: list[str]) -> Entry:
    """Return the entry of a program; for this Python, that of the script or module."""
    if program == sys.executable:
        words = args[1:] if args[:1] == ["-u"] else args
        if len(words) > 1 and words[0] == "-m":
            return Entry("module", words[1], tuple(words[2:]))
        if words and not words[0].startswith("-"):
            return Entry("script", words[0], tuple(words[1:]))
    return Entry("program", program, tuple(args))


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function in messages."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else repr(function)


def _function_entry(path: Path, function: Callable[..., Any], args: Sequence[Any]) -> Entry:
    """Pickle a call to `path`, for a worker to run."""
    dumps = _by_value(function) if _is_nowhere(function) else pickle.dumps
    try:
        write_call(str(path), function, args, dumps)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Could not pickle {function_name(function)} or its arguments ({error}): use a "
            "function at the top level of a module, and arguments that can be pickled."
        ) from error
    return Entry("function", str(path))


def _is_nowhere(function: Callable[..., Any]) -> bool:
    """Return True for a function in a `__main__` without a file: a notebook, `python -c`."""
    main = sys.modules["__main__"]
    in_main = getattr(function, "__module__", None) == "__main__"
    return in_main and main.__spec__ is None and not hasattr(main, "__file__")


def _by_value(function: Callable[..., Any]) -> Callable[[Any], bytes]:
    """Return what pickles functions and classes of a notebook with their code."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        name = function_name(function)
        raise ConfigError(
            f"{name} is defined in a notebook or interactive session, where workers cannot import "
            "it: run pip install cloudpickle. Or write the cell to a file with %%writefile "
            f"steps.py as its first line, and use from steps import {name}."
        ) from None
    return cloudpickle.dumps  # type: ignore[no-any-return]


def entrypoint_name(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """The name of the job's workers: the function, the script or the program."""
    if not isinstance(entrypoint, str):
        return function_name(entrypoint)
    return _program(entrypoint, [str(arg) for arg in args]).name


@contextlib.contextmanager
def _shown_by_python() -> Iterator[tuple[int | None, int | None]]:
    """Yield stdout and stderr for the agent: pipes where Python shows the text, else None."""
    with contextlib.ExitStack() as threads:
        yield (
            threads.enter_context(_pumped_to(sys.stdout)) if _is_replaced(sys.stdout) else None,
            threads.enter_context(_pumped_to(sys.stderr)) if _is_replaced(sys.stderr) else None,
        )


def _is_replaced(out: TextIO) -> bool:
    """Return True in a notebook, whose descriptors lead to the terminal of its server, and for a
    stream without a descriptor, as within `contextlib.redirect_stdout(io.StringIO())`."""
    if type(out).__module__ == "ipykernel.iostream":
        return True
    try:
        out.fileno()
    except (OSError, AttributeError):  # io.UnsupportedOperation is an OSError
        return out is not None
    return False


@contextlib.contextmanager
def _pumped_to(out: TextIO) -> Iterator[int]:
    """Yield a descriptor; what is written to it appears at `out`, all of it before the end."""
    readable, writable = os.pipe()

    def pump() -> None:
        with open(readable, errors="replace") as lines:
            for line in lines:
                out.write(line)

    thread = threading.Thread(target=pump, name="torchelastic-cell-output")
    thread.start()
    try:
        yield writable
    finally:
        os.close(writable)
        thread.join()


@contextlib.contextmanager
def _handed_on(agent: AgentProcess, signals: Sequence[str]) -> Iterator[list[int]]:
    """Forward signals to the agent; yields the list of received signals.

    Only signals without another handler, and only in the main thread, where Python allows it.
    """
    received: list[int] = []

    def hand_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        agent.signal(signum)

    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.Signals[name] for name in signals]
        before = {
            number: signal.getsignal(number)
            for number in numbers
            if signal.getsignal(number) in unhandled
        }
    try:
        for number in before:
            signal.signal(number, hand_on)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(exitcode: int, said: dict[str, Any]) -> Ended:
    world = World.from_json(said["world"]) if said.get("world") else None
    results: dict[str, str] = said.get("results", {})
    without_words = f"the agent exited with code {exitcode} without giving a reason"
    return Ended(
        exitcode=exitcode,
        reason=said.get("reason") or without_words,
        world=world,
        place=world.find(said["node"]) if world is not None else None,
        results={
            rank: _read_result(path)
            for rank, path in sorted((int(rank), path) for rank, path in results.items())
        },
    )


def _read_result(path: str) -> Any:
    """Return the result of the function; None if it called `sys.exit(0)` instead."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    return pickle.loads(data)
