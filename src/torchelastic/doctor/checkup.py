"""All checks of one launch; those that wait run in parallel, each with a time limit."""

from __future__ import annotations

import glob
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torchelastic.agent.spawn.processes import default_python
from torchelastic.agent.workers.environment import node_env
from torchelastic.config import ETCD_BACKENDS, Entry, LaunchConfig
from torchelastic.doctor import endpoints, launch_rules, network, this_machine, torch_check
from torchelastic.doctor.finding import Finding, fault, not_checked, ok, warning

#: Seconds for a check that waits for something.
CHECK_TIMEOUT = 20.0

Check = Callable[[], Sequence[Finding]]


@dataclass(frozen=True)
class Subject:
    """The subject of the checks: a launch, or the machine alone."""

    #: The defaults, without a launch.
    config: LaunchConfig
    #: What workers would run; None: not given.
    entry: Entry | None
    environ: Mapping[str, str]
    #: GPUs that workers would see.
    gpus: int = 0
    #: Why `run` would not start, a sentence each.
    refusals: Sequence[str] = ()
    #: Variables that set a flag; those overridden by a flag; all that belong to a flag.
    used: Sequence[str] = ()
    overridden: Sequence[str] = ()
    known: Sequence[str] = ()
    #: No launch was given, or none that `run` would accept.
    alone: bool = False


def examine(subject: Subject) -> list[Finding]:
    """Run all checks and return their findings in the order to show them.

    Call it while this process has one thread.
    """
    watch = this_machine.ClockWatch()
    here = this_machine.gather()
    asked = side_by_side(
        {
            "ports": (partial(_ports, here, subject), CHECK_TIMEOUT),
            "directories": (partial(directories, subject.config), CHECK_TIMEOUT),
            "name": (partial(_names, subject), CHECK_TIMEOUT),
            "endpoints": (partial(endpoints.listeners, subject.config), CHECK_TIMEOUT),
            "rendezvous": (partial(_backend, subject), CHECK_TIMEOUT),
            "torch": (partial(_torch, subject), torch_check.IMPORT_TIMEOUT + CHECK_TIMEOUT),
        }
    )
    return [
        *_launch(subject),
        *_on_machine(here, subject),
        *asked,
        # Last: it compares the clocks over the whole time.
        this_machine.clock(watch.read(), subject.config),
    ]


def side_by_side(checks: Mapping[str, tuple[Check, float]]) -> list[Finding]:
    """Run checks in parallel and return their findings in the order of the checks.

    A check that times out keeps running in a daemon thread, which ends with the process.
    """
    found: dict[str, Sequence[Finding]] = {}

    def perform(name: str, check: Check) -> None:
        try:
            found[name] = check()
        except Exception as error:  # an unexpected error must not hide the other checks
            found[name] = [not_checked(name, f"The check failed: {type(error).__name__}: {error}.")]

    began = time.monotonic()
    threads = {
        name: threading.Thread(target=perform, args=(name, check), name=name, daemon=True)
        for name, (check, _) in checks.items()
    }
    for thread in threads.values():
        thread.start()
    findings: list[Finding] = []
    for name, (_, limit) in checks.items():
        threads[name].join(max(began + limit - time.monotonic(), 0.0))
        late = [not_checked(name, f"The check timed out after {limit:g} s.")]
        findings += found.get(name, late)
    return findings


def _launch(subject: Subject) -> list[Finding]:
    """Check the command line and the environment variables."""
    config = subject.config
    found = [fault("launch", sentence) for sentence in subject.refusals]
    if subject.alone:
        return found
    found += [warning("launch", note) for note in config.notes]
    if subject.entry is not None:
        found += beside_script(subject.entry)
    found += grow_path(config)
    found += launch_rules.variables(
        subject.environ, config, subject.used, subject.overridden, subject.known
    )
    return found + launch_rules.contradictions(config, subject.environ)


def beside_script(entry: Entry) -> list[Finding]:
    """Find modules next to the script that hide others."""
    if entry.kind == "program":
        return []
    script = entry.kind == "script" and not os.path.isdir(entry.target)
    directory = os.path.dirname(os.path.abspath(entry.target)) if script else os.getcwd()
    found = launch_rules.shadows(_modules_in(directory), directory)
    if script and os.path.isfile(entry.target) and not found:
        return [ok("script", f"{entry.target} exists, and no file next to it hides a module.")]
    return found


def _modules_in(directory: str) -> list[str]:
    """Return the names of the modules and packages in a directory."""
    try:
        entries = os.listdir(directory)
    except OSError:
        return []
    packages = [
        name for name in entries if os.path.exists(os.path.join(directory, name, "__init__.py"))
    ]
    return packages + [name[:-3] for name in entries if name.endswith(".py")]


def grow_path(config: LaunchConfig) -> list[Finding]:
    where = _checkpoints(config)
    if where is None or glob.glob(where):
        return []
    return [
        warning(
            "launch",
            f"--grow {config.grow} waits for a file in {where}, which does not exist: new nodes "
            "would never join.",
            "Correct the path, or create the directory.",
        )
    ]


def _on_machine(here: this_machine.MachineFacts, subject: Subject) -> list[Finding]:
    config = subject.config
    threads = subject.environ.get("OMP_NUM_THREADS", "")
    return [
        this_machine.kernel(here),
        this_machine.cpus(here, config, int(threads) if threads.isdigit() else None),
        this_machine.memory(here, config),
        this_machine.shared_memory(here),
        this_machine.limits(here, config),
        *this_machine.devices(subject.gpus, config),
    ]


def _ports(here: this_machine.MachineFacts, subject: Subject) -> list[Finding]:
    embedded = subject.config.rdzv_backend not in ETCD_BACKENDS
    return [this_machine.ports(here, subject.config, embedded and endpoints.hosts(subject.config))]


def directories(config: LaunchConfig) -> list[Finding]:
    """Check the directories known to be written to; the script may write to others."""
    found = []
    logs = config.log_dir or tempfile.gettempdir()
    # If it is not a directory, `run` refuses it, which is another finding.
    if logs != os.devnull and os.path.isdir(logs):
        found.append(this_machine.directory(this_machine.space_in(logs), "log"))
    checkpoints = _checkpoints(config)
    if checkpoints is not None and os.path.isdir(checkpoints):
        found.append(this_machine.directory(this_machine.space_in(checkpoints), "checkpoint"))
    return found


def _checkpoints(config: LaunchConfig) -> str | None:
    """Return the directory that `--grow after-checkpoint:PATH` watches."""
    if config.grow.when != "after-checkpoint":
        return None
    return os.path.dirname(os.path.abspath(config.grow.path))


def _names(subject: Subject) -> list[Finding]:
    there = network.interface_names()
    return [
        network.name(network.own_name(), subject.config),
        *network.interfaces(subject.environ, there, subject.config, gpus=subject.gpus > 0),
    ]


def _backend(subject: Subject) -> list[Finding]:
    config = subject.config
    if subject.alone:
        return []
    if config.rdzv_backend in ETCD_BACKENDS:
        return [*endpoints.secret(config), *endpoints.etcd(config)]
    return [*endpoints.secret(config), *endpoints.rendezvous(config)]


def _torch(subject: Subject) -> list[Finding]:
    """Check torch in the environment that the agent gives to workers."""
    env = node_env(subject.environ, subject.config)
    if subject.config.max_nodes > 1:
        address = subject.config.local_addr or network.own_name().outward
        interface = network.interface_for_gloo(address)
        if interface is not None:
            env.setdefault(network.GLOO, interface)
    python = subject.environ.get("PYTHON_EXEC") or default_python()
    return torch_check.check(python, env, gpus=subject.gpus)
