"""Build the job from parsed flags: `LaunchConfig` and `Entry`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchelastic.cli.options import rendezvous_rules as rules
from torchelastic.cli.options.flags import FLAGS
from torchelastic.cli.options.parser import Parsed
from torchelastic.cli.options.platform_values import from_platform
from torchelastic.cli.options.shape import shape_of
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.cluster.platform import JOB_DIR, PlatformFacts
from torchelastic.config import Entry, LaunchConfig, default_run_id
from torchelastic.errors import ConfigError
from torchelastic.system.devices import workers_for

#: Flags whose value is the field of the same name.
_SAME_NAME = (
    "role",
    "local_addr",
    "max_restarts",
    "count_resizes",
    "grow",
    "world_sizes",
    "replica_size",
    "preflight",
    "progress_timeout",
    "straggler_threshold",
    "replace_stragglers",
    "quorum",
    "two_node_takeover",
    "witness",
    "preemption",
    "snapshot_replicas",
    "snapshot_bandwidth",
    "preload",
    "start_method",
    "virtual_local_rank",
    "numa_binding",
    "log_dir",
    "redirects",
    "tee",
    "log_line_prefix_template",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "event_log_handler",
    "metrics_address",
    "metrics_token_file",
    "health_port",
    "dashboard",
    "dashboard_token_file",
    "signals_to_handle",
    "shutdown_timeout",
    "monitor_interval",
)


def launch_config(
    parsed: Parsed,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    found: PlatformFacts | None = None,
) -> LaunchConfig:
    """Return the job that the flags describe, with what the platform says where they say nothing;
    devices are counted under `root`."""
    taken = from_platform(parsed, found)
    parsed = taken.parsed
    shape = shape_of(parsed)
    rendezvous = rules.arrange(parsed, shape.max_nodes)
    patience = rules.patience(parsed)
    job_dir = _job_dir(environ, found)
    run_id = parsed["rdzv_id"] if parsed.given("rdzv_id") else ""
    pod = environ.get("POD_UID", "")
    config = LaunchConfig(
        min_nodes=shape.min_nodes,
        max_nodes=shape.max_nodes,
        nproc_per_node=workers_for(shape.workers, environ, root),
        run_id=run_id,
        rdzv_backend=rendezvous.backend,
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_configs=parsed["rdzv_conf"],
        node_rank=rendezvous.node_rank,
        settle=patience.settle,
        lease=patience.lease,
        wait_for_nodes=patience.wait_for_nodes,
        zygote=not parsed["no_zygote"],
        log_copy=not parsed["no_log_copy"],
        notes=(
            *taken.notes,
            *rules.notes(parsed, rendezvous, shape.max_nodes),
            *_ignored(parsed),
        ),
        # Pods of an ElasticJob are of no platform that is detected, and have their UID.
        incarnation=(found.node if found is not None else "") or pod,
        shared_signals=found.leave_signals if found is not None and found.signals_all else (),
        scheduled=bool(job_dir or pod) or (found is not None and run_id == found.run_id != ""),
        job_dir=job_dir,
        **_files(parsed, environ, job_dir),
        **{name: parsed[name] for name in _SAME_NAME},
    )
    if config.run_id:
        return config
    made = default_run_id(config.max_nodes, config.rdzv_endpoint)
    return dataclasses.replace(config, run_id=made)


def _job_dir(environ: Mapping[str, str], found: PlatformFacts | None) -> str:
    """Return the path of the job's directory; empty: it has none."""
    named = environ.get(JOB_DIR) or (found.job_dir if found is not None else "")
    return str(Path(named).absolute()) if named else ""


def _files(parsed: Parsed, environ: Mapping[str, str], directory: str) -> dict[str, Any]:
    """Return the fields for secret and certificates; the job's directory has a secret, too."""
    named = rules.files(parsed)
    if directory and not named["rdzv_secret_file"] and not environ.get("TORCHELASTIC_SECRET"):
        named["rdzv_secret_file"] = str(JobDirectory(Path(directory)).secret)
    return named


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
    if parsed["no_python"]:
        return Entry("program", target, tuple(args))
    return Entry("script", target, tuple(args))


def _ignored(parsed: Parsed) -> tuple[str, ...]:
    names = [flag.name for flag in FLAGS if flag.ignored and parsed.given(flag.dest)]
    if not names:
        return ()
    return (f"Ignored flags: {', '.join(names)}.",)
