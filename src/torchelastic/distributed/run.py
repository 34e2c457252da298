"""`python -m torchelastic.distributed.run`: torchrun's flags, Bagua's defaults.

The functions are those of `torch.distributed.run`: `main` and `run` return when the job has
succeeded, and raise `ChildFailedError` or another error if it has not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchelastic import env
from torchelastic.cli import python_launch, run_program
from torchelastic.cli.command_table import DISTRIBUTED_RUN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from torchelastic.config import LaunchConfig

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
]


def get_args_parser() -> ArgumentParser:
    """Return a parser of all flags; PET_* variables set its defaults."""
    return python_launch.arguments_parser(DISTRIBUTED_RUN, env.snapshot())


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line; its errors end the program, as always with argparse."""
    return get_args_parser().parse_args(args)


def config_from_args(args: Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """Return the config, the program and its arguments for `elastic_launch`."""
    return python_launch.config_and_command(python_launch.parsed_from(args, DISTRIBUTED_RUN))


def run(args: Namespace) -> None:
    """Run the job of a namespace, from `parse_args` here or in torch."""
    python_launch.run(python_launch.parsed_from(args, DISTRIBUTED_RUN))


def main(args: Sequence[str] | None = None) -> None:
    """Run the job of a command line, by default that of this program."""
    python_launch.main(DISTRIBUTED_RUN, args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of `N` or `MIN:MAX`."""
    from torchelastic.config import parse_nnodes
    from torchelastic.errors import ConfigError

    try:
        return parse_nnodes(nnodes)
    except ConfigError as error:
        raise RuntimeError(str(error)) from None  # as in torch


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers for a number, `auto`, `cpu`, `gpu` or `xpu`."""
    from torchelastic.config.values import workers
    from torchelastic.system.devices import workers_for

    return workers_for(workers(nproc_per_node), env.snapshot())


if __name__ == "__main__":
    sys.exit(run_program("DISTRIBUTED_RUN", None))
