"""Inside the zygote: import once, then be copied for every worker.

The zygote is `python -u train.py`, held up while it starts (`startup`). `serve` imports what every
worker would import, forks on request, and returns in the copies, which go on to be train.py.

The agent sends one message first, `{"preload": […]}`, and gets `{"seconds": …}` when the imports
are done. From then on each message is the number of a request, with descriptors: the request
itself as JSON in a file, standard input, output and error, and perhaps the channel. The answer is
`{"number": …, "pid": …}`. `{"error": …}` says why there is no worker, and with `"aside": true` that
there will never be one: the zygote has ended.
"""

from __future__ import annotations

import gc
import glob
import importlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torchelastic import env
from torchelastic.agent import linux, zygote_worker
from torchelastic.agent.cgroup import Cgroup

#: The last is what the first optimizer or DDP of a worker would pay for.
MODULES = ("torch", "torch.distributed", "torch._dynamo")
#: With it torch counts GPUs without touching the driver, which does not survive a fork.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
TITLE = "torchelastic-zygote"
MESSAGE_LIMIT = 64 * 1024
DESCRIPTOR_LIMIT = 8


def serve(descriptor: int) -> None:
    """Fork a worker for every request on this socket; returns in the workers, and only there."""
    signal.setitimer(signal.ITIMER_PROF, 0)  # see `zygote._stop_the_wrong_program`
    agent = os.getppid()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    linux.write_command_line([TITLE])
    env_changes = _warm_up(control)
    linux.outlive_parent()  # the end of the conversation tells, and leaves time to clean up
    cgroup = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_LIMIT, DESCRIPTOR_LIMIT)
        if not message:
            _agent_is_gone(cgroup)
        if reason := unfit_to_fork():
            _step_aside(control, reason)
        request = _read_request(descriptors.pop(0))
        cgroup = Cgroup(request["cgroup"]) if request["cgroup"] else cgroup
        answer = _fork_twice()
        if answer is None:
            control.close()
            zygote_worker.become(request, descriptors, agent, env_changes)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        _send(control, number=int(message), **answer)


def _send(control: socket.socket, **answer: Any) -> None:
    control.send(json.dumps(answer).encode())


def _step_aside(control: socket.socket, reason: str) -> NoReturn:
    _send(control, error=reason, aside=True)
    os._exit(0)


def _agent_is_gone(cgroup: Cgroup | None) -> NoReturn:
    """The last of the three to be there, if agent and guard were killed at once."""
    if cgroup is not None:
        cgroup.remove()
    os._exit(0)


# --- importing -----------------------------------------------------------------------------------


def _warm_up(control: socket.socket) -> dict[str, str | None]:
    """Import everything; returns what the preloaded modules did to the environment."""
    began = time.monotonic()
    preload = json.loads(control.recv(MESSAGE_LIMIT))["preload"]
    env.update({NVML_CHECK: "1"})
    warnings_told = import_all(MODULES)
    if "torch" not in sys.modules:
        _step_aside(control, warnings_told[0])
    before = env.snapshot()
    sys.path[:0] = path_of_main()
    warnings_told += import_all(preload)
    for entry in path_of_main():
        sys.path.remove(entry)
    _settle()
    if reason := unfit_to_fork():
        _step_aside(control, reason)
    _send(control, seconds=time.monotonic() - began, warnings=warnings_told)
    return changes(before, env.snapshot())


def import_all(names: Iterable[str]) -> list[str]:
    """Import modules; those that cannot be imported are told, a sentence each, and left out."""
    told = []
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            told.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return told


def path_of_main() -> list[str]:
    """What Python is going to put before `sys.path` when it runs the program, if anything."""
    if getattr(sys.flags, "safe_path", False):
        return []
    if sys.argv[0] == "-m":
        return [os.getcwd()]
    program = os.path.realpath(sys.argv[0])
    return [program if os.path.isdir(program) else os.path.dirname(program)]


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What must be set, or deleted (None), to come from one environment to another.

    >>> changes({"A": "1", "B": "2"}, {"A": "1", "C": "3"}) == {"B": None, "C": "3"}
    True
    """
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _settle() -> None:
    """Make copies cheap and whole.

    One throw-away fork makes OpenBLAS, which starts threads when it is imported, give them up.
    What the collector does not look at, it does not write to: pages stay shared with the copies.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork with threads, rightly
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    gc.collect()
    gc.freeze()


# --- forking -------------------------------------------------------------------------------------


def unfit_to_fork() -> str:
    """Why a copy of this process would be broken; empty if it would not."""
    threads = linux.thread_names()
    if len(threads) > 1:
        return (
            f"an imported module has started threads, which a fork loses: {len(threads)} of them "
            f"({', '.join(sorted(set(threads)))})"
        )
    if sys.modules["torch"].cuda.is_initialized() or _devices():
        return (
            "an imported module has used the GPU driver, which does not survive a fork"
            f" ({', '.join(_devices()) or 'torch.cuda is initialized'})"
        )
    return ""


def _devices() -> list[str]:
    """Accelerators this process has open."""
    names = []
    for link in glob.glob("/proc/self/fd/*"):
        try:
            names.append(os.readlink(link))
        except FileNotFoundError:
            continue  # the one that listed the directory
    return sorted({name for name in names if name.startswith(("/dev/nvidia", "/dev/kfd"))})


def _read_request(descriptor: int) -> dict[str, Any]:
    with open(descriptor, "rb") as file:
        file.seek(0)  # the agent, with the same open file, has written to its end
        request: dict[str, Any] = json.load(file)
        return request


def _fork_twice() -> dict[str, Any] | None:
    """Fork a process whose parent leaves at once, so that the agent, a subreaper, takes its place.

    None in the new process; elsewhere the answer to the agent, whose child it is by then.
    """
    heard, said = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_and_leave(said)
            return None
        os.waitpid(between, 0)
        os.set_blocking(heard, False)
        return {"pid": int(os.read(heard, 32))}
    except OSError as error:
        return {"error": f"the zygote cannot fork: {error}"}
    finally:
        os.close(heard)
        os.close(said)


def _fork_and_leave(said: int) -> None:
    """Returns in the child only: a second zygote must not come out of here, whatever happens."""
    pid = -1
    try:
        pid = os.fork()
        if pid:
            os.write(said, str(pid).encode())
    finally:
        if pid:
            os._exit(0)
