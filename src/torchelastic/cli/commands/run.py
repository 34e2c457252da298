"""`torchelastic run`, and the two module entry points that share its flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torchelastic import env
from torchelastic.cli import checks, completion
from torchelastic.cli.command_table import RUN
from torchelastic.cli.parser import Parsed
from torchelastic.cli.planned_job import entry_of, launch_config, read_file, shape_of
from torchelastic.cluster.detect import detect
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.cluster.platform import PlatformFacts
from torchelastic.config import Entry, LaunchConfig, default_run_id, format_endpoint
from torchelastic.errors import EXIT_OK, ConfigError
from torchelastic.events import job_registry


def main(parsed: Parsed, perform: Callable[[LaunchConfig, Entry], int] | None = None) -> int:
    """Run a job, by `perform` if given; return the exit code."""
    if parsed["print_completion"]:
        print(completion.script(parsed["print_completion"]), end="")
        return EXIT_OK
    environ = env.snapshot()
    if parsed["hosts"] or parsed["hosts_from"]:
        return _on_hosts(parsed, environ)
    # The other entry points have their own defaults for the rendezvous.
    found = detect(environ, read_file) if parsed.prog == RUN.prog else None
    config, entry = job(parsed, environ, found)
    if late := too_late(config, entry):
        print(f"{parsed.prog}: {late}", file=sys.stderr)
        return EXIT_OK
    if config.job_dir:
        JobDirectory(Path(config.job_dir)).prepare()
    if perform is not None:
        return perform(config, entry)
    # Imported here: errors in the arguments are reported without waiting for the agent's modules.
    from torchelastic.agent.guard import run_job

    return run_job(config, entry)


def _on_hosts(parsed: Parsed, environ: Mapping[str, str]) -> int:
    """Run the whole job from here, on the hosts of --hosts or --hosts-from."""
    import secrets

    from torchelastic.hosts import host_launcher
    from torchelastic.hosts.host_list import read_hosts
    from torchelastic.transport.credentials import load_secret

    if parsed["hosts"] and parsed["hosts_from"]:
        raise ConfigError("--hosts and --hosts-from exclude each other: remove one of them.")
    source = parsed["hosts_from"]
    hosts = read_hosts(source) if source else parsed["hosts"]
    workers = shape_of(parsed).workers
    if isinstance(workers, str):  # counted on each host: this machine may have no GPUs
        parsed = replace(parsed, values={**parsed.values, "nproc_per_node": 1})
    run_id = parsed["rdzv_id"] if parsed.given("rdzv_id") else default_run_id(1, "")
    # Replaced for each host when it is started, unless an endpoint was given.
    first = hosts[0].address if hosts else "localhost"
    found = PlatformFacts(
        platform="hosts",
        run_id=run_id,
        min_nodes=1,
        max_nodes=host_launcher.MOST_HOSTS if source else len(hosts),
        endpoints=(format_endpoint(first, host_launcher.default_port(run_id)),),
        leave_signals=(),
    )
    config, entry = job(parsed, environ, found)
    if parsed["hosts"] and len(hosts) < config.min_nodes and not parsed.given("rdzv_endpoint"):
        raise ConfigError(
            f"The job needs {config.min_nodes} nodes (--nnodes), but --hosts lists {len(hosts)}: "
            "list more hosts, or lower --nnodes."
        )
    secret = load_secret(config)
    return host_launcher.run_on_hosts(
        host_launcher.HostJob(
            config=config,
            entry=entry,
            workers=workers,
            hosts=hosts,
            source=source,
            secret=secret.reveal().decode() if secret is not None else secrets.token_hex(32),
            meets_elsewhere=parsed.given("rdzv_endpoint"),
            may_run=parsed.given("rdzv_id"),
        )
    )


def job(
    parsed: Parsed, environ: Mapping[str, str], found: PlatformFacts | None = None
) -> tuple[LaunchConfig, Entry]:
    """Return the job, after every check that is possible before it starts."""
    checks.check_platform()
    entry = entry_of(parsed)
    config = launch_config(parsed, environ, found=found)
    checks.check_entry(entry, environ)
    checks.check_preload(config.preload, entry)
    checks.prepare_log_dir(config.log_dir)
    return config, entry


def too_late(config: LaunchConfig, entry: Entry) -> str:
    """Return why this node need not start, because the job has finished; empty: it may.

    The same command a second time runs the job again, unless a scheduler gave the id: then a node
    that comes late has the command of the others.
    """
    if config.job_dir:
        return JobDirectory(Path(config.job_dir)).why_too_late(config.run_id)
    if config.max_nodes == 1 or not config.scheduled:
        return ""
    return job_registry.too_late(config.run_id, [entry.target, *entry.args])
