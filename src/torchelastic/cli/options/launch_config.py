"""Build the job from parsed flags: `LaunchConfig` and `Entry`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torchelastic.cli.options import rendezvous_rules as rules
from torchelastic.cli.options.devices import workers_for
from torchelastic.cli.options.flags import FLAGS
from torchelastic.cli.options.parser import Parsed
from torchelastic.config import Entry, LaunchConfig, default_run_id
from torchelastic.errors import ConfigError

#: Flags whose value is the field of the same name.
_SAME_NAME = (
    "role",
    "local_addr",
    "max_restarts",
    "count_resizes",
    "grow",
    "world_sizes",
    "preflight",
    "progress_timeout",
    "straggler_threshold",
    "replace_stragglers",
    "quorum",
    "two_node_takeover",
    "witness",
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
    "dashboard",
    "dashboard_token_file",
    "signals_to_handle",
    "shutdown_timeout",
    "monitor_interval",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The number of nodes, and of workers on each."""

    min_nodes: int
    max_nodes: int
    workers: int | str


def launch_config(
    parsed: Parsed, environ: Mapping[str, str], root: Path = Path("/")
) -> LaunchConfig:
    """Return the job that the flags describe; devices are counted under `root`."""
    shape = shape_of(parsed)
    rendezvous = rules.arrange(parsed, shape.max_nodes)
    patience = rules.patience(parsed)
    config = LaunchConfig(
        min_nodes=shape.min_nodes,
        max_nodes=shape.max_nodes,
        nproc_per_node=workers_for(shape.workers, environ, root),
        run_id=parsed["rdzv_id"] if parsed.given("rdzv_id") else "",
        rdzv_backend=rendezvous.backend,
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_configs=parsed["rdzv_conf"],
        node_rank=rendezvous.node_rank,
        settle=patience.settle,
        lease=patience.lease,
        wait_for_nodes=patience.wait_for_nodes,
        zygote=not parsed["no_zygote"],
        log_copy=not parsed["no_log_copy"],
        notes=(*rules.notes(parsed, rendezvous, shape.max_nodes), *_ignored(parsed)),
        **rules.files(parsed),
        **{name: parsed[name] for name in _SAME_NAME},
    )
    if config.run_id:
        return config
    run_id = default_run_id(config.max_nodes, config.rdzv_endpoint)
    return dataclasses.replace(config, run_id=run_id)


def shape_of(parsed: Parsed) -> Shape:
    """Return the shape from `-j` or the long flags; a flag wins over a variable."""
    (min_nodes, max_nodes), workers = parsed["nnodes"], parsed["nproc_per_node"]
    short = parsed.strength["shape"]
    for dest in ("nnodes", "nproc_per_node"):
        long = parsed.strength[dest]
        if short and short == long:
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
    return Shape(min_nodes, max_nodes, workers)


def entry_of(parsed: Parsed, prog: str) -> Entry:
    """Return what the workers run."""
    if not parsed.command:
        raise ConfigError(f"No script given: name one, as in {prog} train.py.")
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
