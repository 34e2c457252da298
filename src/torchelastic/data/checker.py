"""Check in the ledgers that each epoch used every sample exactly once, or skipped it.

    python -m torchelastic.data.checker DIR [DIR ...] [--samples N] [--epochs E]

`verdict` explains which lines are valid and what they prove.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.data.verdict import Line, Sample, check
from torchelastic.errors import EXIT_FAILED, EXIT_OK


@dataclass
class Ledgers:
    """The lines of all ledgers, and how many were lost or unreadable."""

    lines: list[Line] = field(default_factory=list)
    lost: int = 0
    unreadable: int = 0


def read(directories: Sequence[Path]) -> Ledgers:
    """Read all ledgers in and below these directories; each directory is a start of the job."""
    found = Ledgers()
    for start, directory in enumerate(directories):
        for path in sorted(directory.rglob("g*-r*.jsonl")):
            _read_file(path, start, found)
    return found


def _read_file(path: Path, start: int, found: Ledgers) -> None:
    lost = 0
    with path.open("rb") as texts:
        for text in texts:
            match parse(text, start) if text.strip() else 0:
                case Line() as line:
                    found.lines.append(line)
                case None:
                    found.unreadable += 1
                case int(so_far):
                    lost = max(lost, so_far)
    found.lost += lost


def parse(text: bytes, start: int = 0) -> Line | int | None:
    """Parse a line, or the number of lines its writer has lost; None if it is neither."""
    try:
        data = json.loads(text)
        if "lost" in data:
            return _number(data["lost"])
        names = ("generation", "step", "rank", "epoch")
        return Line(
            **{name: _number(data[name]) for name in names},
            ids=tuple(_pair(one) if isinstance(one, list) else _number(one) for one in data["ids"]),
            size=_number(data["size"]) if "size" in data else None,
            span=_pair(data["span"]) if "span" in data else None,
            skipped=data.get("skipped") is True,
            start=start,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return _number(first), _number(second)


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not a number")
    return value


# --- the command ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Read, check, report; return 0 if every sample was used exactly once or skipped, else 1."""
    given = _parser().parse_args(argv)
    ledgers = read(given.directories)
    verdict = check(
        ledgers.lines,
        expected=_expected(given.samples, given.shards),
        epochs=given.epochs,
        dropped=given.dropped,
        lost=ledgers.lost,
        unreadable=ledgers.unreadable,
    )
    print(verdict)
    return EXIT_OK if verdict.ok else EXIT_FAILED


def _expected(samples: int | None, shards: Sequence[int] | None) -> Collection[Sample] | None:
    if shards is not None:
        return {(shard, record) for shard, count in enumerate(shards) for record in range(count)}
    return None if samples is None else range(samples)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchelastic.data.checker",
        description="Check in the ledgers that each epoch used every sample exactly once.",
    )
    add = parser.add_argument
    add("directories", metavar="DIR", type=_directory, nargs="+", help="ledgers; one per start")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--samples", type=int, metavar="N", help="samples per epoch")
    which.add_argument("--shards", type=_counts, metavar="N,N,...", help="records in each shard")
    add("--epochs", type=int, metavar="E", help="complete epochs (default: all but the last)")
    add("--dropped", type=int, default=0, metavar="K", help="samples an epoch may skip")
    return parser


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is not a directory")
    return path


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
