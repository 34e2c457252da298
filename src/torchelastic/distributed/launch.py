"""`python -m torchelastic.distributed.launch`: the defaults of torchelastic 0.2.

As in 0.2 and with `--use-env`, workers get their local rank only in LOCAL_RANK. With
`--no-use-env`, scripts also get `--local-rank=N`, as with `torch.distributed.launch`. The functions
raise if the job fails, like those of `run`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchelastic import env
from torchelastic.cli import python_launch, run_program
from torchelastic.cli.command_table import DISTRIBUTED_LAUNCH
from torchelastic.compat.old_names import __getattr__  # noqa: F401
from torchelastic.distributed.run import determine_local_world_size, parse_min_max_nnodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ["determine_local_world_size", "launch", "main", "parse_args", "parse_min_max_nnodes"]


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line; its errors end the program, as always with argparse."""
    return python_launch.arguments_parser(DISTRIBUTED_LAUNCH, env.snapshot()).parse_args(args)


def launch(args: Namespace) -> None:
    """Run the job of a namespace."""
    python_launch.run(python_launch.parsed_from(args, DISTRIBUTED_LAUNCH))


def main(args: Sequence[str] | None = None) -> None:
    """Run the job of a command line, by default that of this program."""
    python_launch.main(DISTRIBUTED_LAUNCH, args)


if __name__ == "__main__":
    sys.exit(run_program("DISTRIBUTED_LAUNCH", None))
