"""`torchelastic run`, and the two module entry points that share its flags."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torchelastic import env
from torchelastic.cli import checks
from torchelastic.cli.flavours import RUN, Flavour
from torchelastic.cli.job import entry_of, launch_config
from torchelastic.cli.parser import Parsed, parse
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import EXIT_OK, EXIT_USAGE, ConfigError


def main(argv: Sequence[str], flavour: Flavour = RUN) -> int:
    """Run a job from a command line; returns the exit code."""
    environ = env.snapshot()
    try:
        parsed = parse(argv, flavour, environ)
        if parsed["help"]:
            return show_help(flavour)
        config, entry = job(parsed, flavour, environ)
    except ConfigError as error:
        print(f"{flavour.prog}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    # Imported here: help and mistakes are answered without loading the agent.
    from torchelastic.agent.main import run_job

    return run_job(config, entry)


def job(parsed: Parsed, flavour: Flavour, environ: Mapping[str, str]) -> tuple[LaunchConfig, Entry]:
    """The job that was asked for, after every check that can be made before it starts."""
    checks.check_platform()
    entry = entry_of(parsed, flavour.prog)
    config = launch_config(parsed, environ)
    checks.check_entry(entry, environ)
    checks.check_preload(config.preload, entry)
    checks.prepare_log_dir(config.log_dir)
    return config, entry


def show_help(flavour: Flavour) -> int:
    from torchelastic.cli.help import help_text, terminal_width

    print(help_text(flavour, terminal_width()), end="")
    return EXIT_OK
