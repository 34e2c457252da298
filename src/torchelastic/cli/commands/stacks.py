"""`torchelastic stacks`: print the current stack of each rank of a running job."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_FAILED, EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Show the step, last collective and current stack of each rank of a running job. Ranks with the same
stack are shown together. An agent on this machine asks all others; training continues.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `stacks` command; return the exit code."""
    parser = terminal.parser_for_a_job("stacks", _DESCRIPTION)
    parser.add_argument("--rank", type=int, metavar="N", help="show only this rank")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    # Imported here: it is slow to import, and `--help` must be fast.
    from torchelastic.cli.commands import stacks_text

    try:
        found = stacks_text.ask(args.job, args.id)
        if args.rank is not None:
            found = stacks_text.only(found, args.rank)
    except TorchElasticError as error:
        return terminal.refuse("stacks", error)
    terminal.show(stacks_text.as_json(found) if args.json else stacks_text.text(found))
    return EXIT_OK if found.doings else EXIT_FAILED
