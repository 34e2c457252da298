"""All checks of one launch, side by side where they wait, each with a time limit."""

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
from torchelastic.doctor import (
    etcd_check,
    machine_facts,
    machine_rules,
    network_facts,
    network_rules,
    port_checks,
    rendezvous_check,
    timeout_rules,
    torch_check,
    variables,
)
from torchelastic.doctor.finding import Finding, fault, not_checked, ok, warning

#: Seconds for a check that asks others.
LIMIT = 20.0

Check = Callable[[], Sequence[Finding]]


@dataclass(frozen=True)
class Subject:
    """What is examined: a launch, or the machine alone."""

    #: As by default, where there is no launch.
    config: LaunchConfig
    #: What workers would run; None: not said.
    entry: Entry | None
    environ: Mapping[str, str]
    #: GPUs that workers would see.
    gpus: int = 0
    #: Why `run` would not start, a sentence each.
    refusals: Sequence[str] = ()
    #: Variables that set a flag; whose flag is given as well; that any flag has.
    used: Sequence[str] = ()
    overridden: Sequence[str] = ()
    known: Sequence[str] = ()
    #: Nothing was said of a launch, or nothing that `run` could make one of.
    alone: bool = False


def examine(subject: Subject) -> list[Finding]:
    """Every finding, in the order in which they are told.

    To be called while this process has one thread.
    """
    watch = machine_facts.ClockWatch()
    here = machine_facts.gather()
    asked = side_by_side(
        {
            "ports": (partial(_ports, here, subject), LIMIT),
            "directories": (partial(_directories, subject.config), LIMIT),
            "name": (partial(_names, subject), LIMIT),
            "endpoints": (partial(port_checks.check, subject.config), LIMIT),
            "rendezvous": (partial(_backend, subject), LIMIT),
            "torch": (partial(_torch, subject), torch_check.LIMIT + LIMIT),
        }
    )
    return [
        *_launch(subject),
        *_on_machine(here, subject),
        *asked,
        # Last: it compares the clocks over all that time.
        machine_rules.clock(watch.read(), subject.config),
    ]


def side_by_side(checks: Mapping[str, tuple[Check, float]]) -> list[Finding]:
    """The findings of checks that wait, in the order of the checks.

    One that does not end in time is left to itself, in a thread that ends with the process.
    """
    found: dict[str, Sequence[Finding]] = {}

    def perform(name: str, check: Check) -> None:
        try:
            found[name] = check()
        except Exception as error:  # told: what a check does not foresee must not hide the others
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
        late = [not_checked(name, f"The check did not end within {limit:g} s.")]
        findings += found.get(name, late)
    return findings


def _launch(subject: Subject) -> list[Finding]:
    """What can be said of the command line and the variables alone."""
    config = subject.config
    found = [fault("launch", sentence) for sentence in subject.refusals]
    if subject.alone:
        return found
    found += [warning("launch", note) for note in config.notes]
    if subject.entry is not None:
        found += _beside(subject.entry)
    found += _grow(config)
    found += variables.variables(
        subject.environ, config, subject.used, subject.overridden, subject.known
    )
    return found + timeout_rules.contradictions(config, subject.environ)


def _beside(entry: Entry) -> list[Finding]:
    """Modules that the script would import in place of others."""
    if entry.kind == "program":
        return []
    script = entry.kind == "script" and not os.path.isdir(entry.target)
    directory = os.path.dirname(os.path.abspath(entry.target)) if script else os.getcwd()
    found = variables.shadows(_modules_in(directory), directory)
    if script and os.path.isfile(entry.target) and not found:
        return [ok("script", f"{entry.target} is there, and nothing beside it hides a module.")]
    return found


def _modules_in(directory: str) -> list[str]:
    """The names under which something in a directory can be imported."""
    try:
        entries = os.listdir(directory)
    except OSError:
        return []
    packages = [
        name for name in entries if os.path.exists(os.path.join(directory, name, "__init__.py"))
    ]
    return packages + [name[:-3] for name in entries if name.endswith(".py")]


def _grow(config: LaunchConfig) -> list[Finding]:
    where = _checkpoints(config)
    if where is None or glob.glob(where):
        return []
    return [
        warning(
            "launch",
            f"--grow {config.grow} waits for something in {where}, which is not there: newcomers "
            "would never come in.",
            "Correct the path, or make the directory.",
        )
    ]


def _on_machine(here: machine_rules.Machine, subject: Subject) -> list[Finding]:
    config = subject.config
    threads = subject.environ.get("OMP_NUM_THREADS", "")
    return [
        machine_rules.kernel(here),
        machine_rules.cpus(here, config, int(threads) if threads.isdigit() else None),
        machine_rules.memory(here, config),
        machine_rules.shared_memory(here),
        machine_rules.limits(here, config),
        *machine_rules.devices(subject.gpus, config),
    ]


def _ports(here: machine_rules.Machine, subject: Subject) -> list[Finding]:
    embedded = subject.config.rdzv_backend not in ETCD_BACKENDS
    return [
        machine_rules.ports(
            here, subject.config, embedded and rendezvous_check.hosts(subject.config)
        )
    ]


def _directories(config: LaunchConfig) -> list[Finding]:
    """Those that are known to be written to; where a script has its checkpoints, only it knows."""
    found = []
    logs = config.log_dir or tempfile.gettempdir()
    # Where it is none, a refusal of `run` says so.
    if logs != os.devnull and os.path.isdir(logs):
        found.append(machine_rules.directory(machine_facts.space_in(logs), "log"))
    checkpoints = _checkpoints(config)
    if checkpoints is not None and os.path.isdir(checkpoints):
        found.append(machine_rules.directory(machine_facts.space_in(checkpoints), "checkpoint"))
    return found


def _checkpoints(config: LaunchConfig) -> str | None:
    """The directory that `--grow after-checkpoint:PATH` waits for something in."""
    if config.grow.when != "after-checkpoint":
        return None
    return os.path.dirname(os.path.abspath(config.grow.path))


def _names(subject: Subject) -> list[Finding]:
    there = network_facts.interface_names()
    return [
        network_rules.name(network_facts.own_name(), subject.config),
        *network_rules.interfaces(subject.environ, there, subject.config, gpus=subject.gpus > 0),
    ]


def _backend(subject: Subject) -> list[Finding]:
    config = subject.config
    if subject.alone:
        return []
    if config.rdzv_backend in ETCD_BACKENDS:
        return [*rendezvous_check.secret(config), *etcd_check.check(config)]
    return [*rendezvous_check.secret(config), *rendezvous_check.check(config)]


def _torch(subject: Subject) -> list[Finding]:
    """In the environment that the agent gives to workers."""
    env = node_env(subject.environ, subject.config)
    if subject.config.max_nodes > 1:
        address = subject.config.local_addr or network_facts.own_name().outward
        interface = network_facts.interface_for_gloo(address)
        if interface is not None:
            env.setdefault(network_rules.GLOO, interface)
    python = subject.environ.get("PYTHON_EXEC") or default_python()
    return torch_check.check(python, env, gpus=subject.gpus)
