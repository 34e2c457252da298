"""Build the job from parsed flags: `LaunchConfig` and `Entry`.

A setting whose flag has the name of its field needs nothing here. Decided here are those that
several flags set: the shape, the rendezvous, and what the platform says where the flags do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchelastic.cli.flags import FLAGS, SETTINGS
from torchelastic.cli.parser import DEFAULT, PLATFORM, VARIABLE, Parsed
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.cluster.platform import JOB_DIR, PlatformFacts
from torchelastic.config import (
    DEFAULT_STATIC_PORT,
    ETCD_BACKENDS,
    OWN_ETCD,
    Entry,
    LaunchConfig,
    default_run_id,
    format_endpoint,
)
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.backend_parameters import (
    FILE_KEYS,
    check_backend,
    fields_from_conf,
    keys_without_meaning,
)
from torchelastic.system.devices import workers_for

#: Seconds of the platform's grace time that the agent keeps for itself.
MARGIN = 2.0


def launch_config(
    parsed: Parsed,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    found: PlatformFacts | None = None,
) -> LaunchConfig:
    """Return the job that the flags describe, with what the platform says where they say nothing;
    devices are counted under `root`."""
    parsed, platform_notes = from_platform(parsed, found)
    shape = shape_of(parsed)
    rendezvous = choose_rendezvous(parsed, shape.max_nodes)
    named = environ.get(JOB_DIR) or (found.job_dir if found is not None else "")
    job_dir = str(Path(named).absolute()) if named else ""
    run_id = parsed["rdzv_id"] if parsed.given("rdzv_id") else ""
    pod = environ.get("POD_UID", "")
    same = {name: parsed[name] for name, flag in SETTINGS.items() if flag.dest == name}
    decided: dict[str, Any] = {
        "min_nodes": shape.min_nodes,
        "max_nodes": shape.max_nodes,
        "nproc_per_node": workers_for(shape.workers, environ, root),
        "run_id": run_id,
        "rdzv_backend": rendezvous.backend,
        "rdzv_endpoint": rendezvous.endpoint,
        "node_rank": rendezvous.node_rank,
        "rdzv_configs": parsed["rdzv_conf"],
        "zygote": not parsed["no_zygote"],
        "log_copy": not parsed["no_log_copy"],
        "notes": (*platform_notes, *_notes(parsed, rendezvous, shape.max_nodes)),
        # Pods of an ElasticJob are of no platform that is detected, and have their UID.
        "incarnation": (found.node if found is not None else "") or pod,
        "shared_signals": found.leave_signals if found is not None and found.signals_all else (),
        "scheduled": bool(job_dir or pod) or (found is not None and run_id == found.run_id != ""),
        "job_dir": job_dir,
        **times(parsed),
        **_files(parsed, environ, job_dir),
    }
    config = LaunchConfig(**{**same, **decided})
    if config.run_id:
        return config
    made = default_run_id(config.max_nodes, config.rdzv_endpoint)
    return dataclasses.replace(config, run_id=made)


def entry_of(parsed: Parsed) -> Entry:
    """Return what the workers run."""
    if not parsed.command:
        raise ConfigError(f"No script given: name one, as in {parsed.prog} train.py.")
    target, *args = parsed.command
    if parsed["no_use_env"]:
        args.insert(0, "--local-rank=${local_rank}")
    if parsed["run_path"]:
        return Entry("script", target, tuple(args))
    if parsed["module"] and parsed["no_python"]:
        raise ConfigError("--module and --no-python exclude each other: remove one of them.")
    if parsed["module"]:
        return Entry("module", target, tuple(args))
    return Entry("program" if parsed["no_python"] else "script", target, tuple(args))


# --- shape ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobShape:
    """The number of nodes, and of workers on each."""

    min_nodes: int
    max_nodes: int
    workers: int | str


def shape_of(parsed: Parsed) -> JobShape:
    """Return the shape from `-j` or the long flags; a flag wins over a variable."""
    (min_nodes, max_nodes), workers = parsed["nnodes"], parsed["nproc_per_node"]
    short = parsed.strength["shape"]
    for dest in ("nnodes", "nproc_per_node"):
        if short and short == parsed.strength[dest]:
            raise ConfigError(
                f"-j and --{dest.replace('_', '-')} set the same thing: remove one of them."
            )
    if short > parsed.strength["nnodes"]:
        min_nodes, max_nodes, _ = parsed["shape"]
    if short > parsed.strength["nproc_per_node"]:
        workers = parsed["shape"][2]
    if parsed["standalone"]:
        if min_nodes > 1:
            raise ConfigError(
                f"--standalone is for one node, but the job needs {min_nodes}: remove it and give "
                "every node the same --rdzv-endpoint HOST:PORT."
            )
        max_nodes = 1
    return JobShape(min_nodes, max_nodes, workers)


# --- rendezvous -------------------------------------------------------------------------------


class BackendChoice(NamedTuple):
    """The chosen rendezvous; without an endpoint it is private to this node."""

    backend: str
    endpoint: str = ""
    node_rank: int | None = None


def choose_rendezvous(parsed: Parsed, max_nodes: int) -> BackendChoice:
    """Choose where and how the nodes meet."""
    if parsed["standalone"]:
        # As in 0.2: etcd, if requested, is started beside the job.
        at_etcd = parsed.given("rdzv_backend") and parsed["rdzv_backend"] in ETCD_BACKENDS
        return BackendChoice(_backend(parsed), OWN_ETCD) if at_etcd else BackendChoice("c10d")
    backend = _backend(parsed)
    if backend != "static":
        return BackendChoice(backend, parsed["rdzv_endpoint"])
    node_rank, port = parsed["node_rank"], parsed["master_port"]
    if node_rank >= max_nodes:
        raise ConfigError(
            f"--node-rank {node_rank} is too large for a job of {max_nodes} node(s): set --nnodes "
            "to the number of nodes, and give each node a different rank, starting at 0."
        )
    if parsed["rdzv_endpoint"]:
        return BackendChoice(backend, parsed["rdzv_endpoint"], node_rank)
    if port is None and max_nodes == 1:
        # As torchrun does: no other node connects to this one, so it needs no fixed port.
        return BackendChoice("c10d")
    endpoint = format_endpoint(parsed["master_addr"], DEFAULT_STATIC_PORT if port is None else port)
    return BackendChoice(backend, endpoint, node_rank)


def _backend(parsed: Parsed) -> str:
    """Return the requested rendezvous, or else the one that the other flags imply."""
    backend: str = parsed["rdzv_backend"]
    if not parsed.given("rdzv_backend"):
        if parsed.given("node_rank"):
            return "static"
        if not parsed["rdzv_endpoint"]:
            addressed = parsed.given("master_addr") or parsed.given("master_port")
            return "static" if addressed else "c10d"
    check_backend(backend, parsed["rdzv_conf"])
    return backend


def times(parsed: Parsed) -> dict[str, float]:
    """Return the fields of the times: from their flags, else torchrun's keys, else the defaults."""
    by_keys = fields_from_conf(parsed["rdzv_conf"])
    return {
        dest: parsed[dest] if parsed.given(dest) else by_keys.get(dest, parsed[dest])
        for dest in ("settle", "lease", "wait_for_nodes")
    }


def _files(parsed: Parsed, environ: Mapping[str, str], job_dir: str) -> dict[str, str | None]:
    """Return the fields for the secret and the certificates: from their flags or their keys. The
    job's directory has a secret, too."""
    by_keys = fields_from_conf(parsed["rdzv_conf"])
    names = [f"rdzv_{key}" for key in FILE_KEYS]
    named = {name: parsed[name] or by_keys.get(name) for name in names}
    if job_dir and not named["rdzv_secret_file"] and not environ.get("TORCHELASTIC_SECRET"):
        named["rdzv_secret_file"] = str(JobDirectory(Path(job_dir)).secret)
    return named


def _notes(parsed: Parsed, rendezvous: BackendChoice, max_nodes: int) -> list[str]:
    """Return a sentence for each kind of flag or key that is ignored."""
    notes = []
    if keys := keys_without_meaning(parsed["rdzv_conf"], rendezvous.backend):
        notes.append(f"Ignored keys of --rdzv-conf: {', '.join(keys)}.")
    unused = [
        f"--{dest.replace('_', '-')}"
        for dest in ("node_rank", "master_addr", "master_port")
        if parsed.given(dest)
    ]
    if unused and rendezvous.backend != "static" and max_nodes > 1:
        notes.append(f"Ignored {', '.join(unused)}: only a static rendezvous uses them.")
    if ignored := [flag.name for flag in FLAGS if flag.ignored and parsed.given(flag.dest)]:
        notes.append(f"Ignored flags: {', '.join(ignored)}.")
    return notes


# --- platform ---------------------------------------------------------------------------------


def read_file(path: str) -> str | None:
    """Return the text of a file, for `cluster.detect`; None if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def from_platform(parsed: Parsed, found: PlatformFacts | None) -> tuple[Parsed, list[str]]:
    """Return the flags with the platform's values where nothing was given, and what to log.

    A flag wins, then a PET_* variable, then the platform, each value for itself. Several nodes are
    taken only together with a place to meet; with --standalone, nothing is.
    """
    if found is None or parsed["standalone"]:
        return parsed, []
    offered = _offered(parsed, found)
    merged = _with(parsed, {d: v for d, v in offered.items() if not parsed.given(d)}, PLATFORM)
    if shape_of(merged).max_nodes == 1 and merged.strength["rdzv_endpoint"] == PLATFORM:
        merged = _with(merged, {"rdzv_endpoint": parsed["rdzv_endpoint"]}, DEFAULT)
    return merged, [text for text in (_sentence(merged, found), found.advice) if text]


def _offered(parsed: Parsed, found: PlatformFacts) -> dict[str, Any]:
    """Return the values of flags that the platform offers."""
    offered: dict[str, Any] = {}
    if found.run_id:
        offered["rdzv_id"] = found.run_id
    meets_elsewhere = parsed["rdzv_backend"] in ETCD_BACKENDS or any(
        parsed.given(dest) for dest in ("rdzv_endpoint", "master_addr", "master_port")
    )
    if found.endpoints and not meets_elsewhere:
        offered["rdzv_endpoint"] = ",".join(found.endpoints)
    if found.max_nodes is not None and (meets_elsewhere or found.endpoints):
        offered["nnodes"] = (found.min_nodes or found.max_nodes, found.max_nodes)
    more = [name for name in found.leave_signals if name not in parsed["signals_to_handle"]]
    if more:
        offered["signals_to_handle"] = (*parsed["signals_to_handle"], *more)
    if found.grace is not None:
        offered["shutdown_timeout"] = max(1.0, found.grace - MARGIN)
    return offered


def _with(parsed: Parsed, taken: Mapping[str, Any], strength: int) -> Parsed:
    return dataclasses.replace(
        parsed,
        values={**parsed.values, **taken},
        strength={**parsed.strength, **dict.fromkeys(taken, strength)},
    )


def _sentence(parsed: Parsed, found: PlatformFacts) -> str:
    """Return what was found and where; what a flag overrides is left out."""
    shape = shape_of(parsed)
    values = {
        "nnodes": ("max_nodes", f"nodes {shape.min_nodes}:{shape.max_nodes}"),
        "rdzv_endpoint": ("endpoints", f"endpoint {parsed['rdzv_endpoint']}"),
        "rdzv_id": ("run_id", f"run id {parsed['rdzv_id']}"),
    }
    said = [
        f"{text} ({found.sources[field]})"
        for dest, (field, text) in values.items()
        if field in found.sources and _is_of_platform(parsed, dest, found.sources[field])
    ]
    if found.leave_signals:
        grace = "" if found.grace is None else f" with {found.grace:g} s"
        said.append(f"leaves on {' or '.join(found.leave_signals)}{grace}")
    name = f"{found.platform} {found.job}".rstrip()
    return f"{name}: {', '.join(said)}." if said else ""


def _is_of_platform(parsed: Parsed, dest: str, source: str) -> bool:
    """Return whether a flag has its value from the platform, PET_* variables included."""
    strength = parsed.strength[dest]
    return strength == PLATFORM or (strength == VARIABLE and source.startswith("PET_"))
