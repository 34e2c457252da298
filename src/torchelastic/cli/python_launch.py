"""A launch from Python, with the functions of torch's launcher: it raises instead of exiting."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from torchelastic import env
from torchelastic.cli.options.command import Command
from torchelastic.cli.options.parser import Parsed, parse
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import EXIT_OK, TorchElasticError


def main(command: Command, argv: Sequence[str] | None) -> None:
    """Run the job of a command line; return when it has succeeded, and raise if it has not."""
    parsed = parse(sys.argv[1:] if argv is None else argv, command, env.snapshot())
    if parsed["help"]:
        from torchelastic.cli.options.help import help_text, terminal_width

        print(help_text(command, terminal_width()), end="")
        return
    if env.get("TORCHELASTIC_ERROR_FILE"):  # a launcher is to be told what failed
        record = importlib.import_module("torch.distributed.elastic.multiprocessing.errors").record
        record(run)(parsed)
    else:
        run(parsed)


def run(parsed: Parsed) -> None:
    """Run a job; raise if it has not succeeded, like `torchelastic.launcher.launch_agent`."""
    from torchelastic.cli.commands import run as command

    exitcode = command.main(parsed, _in_agent_process)
    if exitcode != EXIT_OK:  # from --hosts, which has printed the reason
        raise TorchElasticError(f"The job ended with exit code {exitcode}.")


def config_and_command(parsed: Parsed) -> tuple[LaunchConfig, str, list[str]]:
    """Return what `elastic_launch(config, entrypoint)(*args)` needs to run the job."""
    from torchelastic.cli.commands.run import job

    config, entry = job(parsed, env.snapshot())
    if entry.kind == "program":
        return config, entry.target, list(entry.args)
    as_module = ["-m"] if entry.kind == "module" else []
    return config, sys.executable, ["-u", *as_module, entry.target, *entry.args]


def _in_agent_process(config: LaunchConfig, entry: Entry) -> int:
    from torchelastic.launcher.launch_job import private_directory, run_entry

    with private_directory() as directory:
        ended = run_entry(config, entry, directory)
    if ended.exitcode != EXIT_OK:
        raise ended.error(entry.name)
    return EXIT_OK
