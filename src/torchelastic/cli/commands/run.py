"""`torchelastic run`, and the two module entry points that share its flags."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torchelastic import env
from torchelastic.cli.options import checks
from torchelastic.cli.options.command_defaults import RUN, CommandDefaults
from torchelastic.cli.options.launch_config import entry_of, launch_config
from torchelastic.cli.options.parser import Parsed, parse
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import EXIT_OK, EXIT_USAGE, ConfigError
from torchelastic.events import job_registry


def main(argv: Sequence[str], defaults: CommandDefaults = RUN) -> int:
    """Run a job from a command line; return the exit code."""
    environ = env.snapshot()
    try:
        parsed = parse(argv, defaults, environ)
        if parsed["help"]:
            return show_help(defaults)
        if parsed["print_completion"]:
            return show_completion(parsed["print_completion"])
        config, entry = job(parsed, defaults, environ)
        # Without --rdzv-id, all jobs at that endpoint have the same id.
        named = config.max_nodes > 1 and parsed.given("rdzv_id")
        late = job_registry.too_late(config.run_id, [entry.target, *entry.args]) if named else ""
    except ConfigError as error:
        print(f"{defaults.prog}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if late:
        print(f"{defaults.prog}: {late}", file=sys.stderr)
        return EXIT_OK
    # Imported here: help and usage errors do not need the agent.
    from torchelastic.agent.main import run_job

    return run_job(config, entry)


def job(
    parsed: Parsed, defaults: CommandDefaults, environ: Mapping[str, str]
) -> tuple[LaunchConfig, Entry]:
    """Return the job, after every check that is possible before it starts."""
    checks.check_platform()
    entry = entry_of(parsed, defaults.prog)
    config = launch_config(parsed, environ)
    checks.check_entry(entry, environ)
    checks.check_preload(config.preload, entry)
    checks.prepare_log_dir(config.log_dir)
    return config, entry


def show_help(defaults: CommandDefaults) -> int:
    from torchelastic.cli.options.help import help_text, terminal_width

    print(help_text(defaults, terminal_width()), end="")
    return EXIT_OK


def show_completion(shell: str) -> int:
    from torchelastic.cli.options.completion import script

    print(script(shell), end="")
    return EXIT_OK
