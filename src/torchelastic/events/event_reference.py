"""Print `docs/reference/events.md`: `python -m torchelastic.events.event_reference`."""

from __future__ import annotations

import inspect
import re
import sys

from torchelastic.events import log
from torchelastic.events.types import EVENTS, Event

_HEAD = """\
# Events

<!-- Generated from types.py by `python -m torchelastic.events.event_reference`. -->

Every agent writes what happens, and why, to a file `events.jsonl`: one JSON object per line, each
written immediately. With `--log-dir` the file is in the run directory, otherwise next to the
agent's entry under `$XDG_RUNTIME_DIR/torchelastic` (see [logs](../guides/logs.md)).
`torchelastic status` prints its path. `--event-log-handler console` prints the same lines on
stderr.

At {size} MiB the file is rotated to `events.jsonl.1`. That file begins with the events of the
previous `events.jsonl.1`, without `progress`, `checkpoint-stored` and `weights-hashed`, up to a
quarter of the size.
Rotation runs in the background; `events.jsonl.0` exists while it does.

The leader of the job also writes `job.jsonl`: the events of all agents that have reached it.

```sh
jq -r 'select(.type == "generation-over") | "\\(.generation): \\(.reason)"' events.jsonl
```

Every line has:

| field | type | meaning |
|---|---|---|
| `v` | int | version of this format: 1 |
| `type` | str | the event type, see below |
| `job` | str | the job id |
| `node` | str | id of the agent that wrote the line |
| `wall` | float | wall clock, seconds since 1970; for people |
| `mono` | float | monotonic clock of the machine; orders the events of all its agents |
| `generation` | int or null | the generation that the event belongs to, if any |
| `heard` | float | only in `job.jsonl`: estimated time of the event on the leader's `mono` |

Skip types and fields that you do not know, and lines that you cannot parse: after a power failure
the last line may be incomplete.

## Types
"""


def page() -> str:
    """Return the whole page."""
    sections = [_section(name, cls) for name, cls in EVENTS.items()]
    return "\n".join([_HEAD.format(size=log.MAX_BYTES // 2**20), *sections])


def _section(name: str, cls: type[Event]) -> str:
    rows = [f"| `{field}` | {kind} | {meaning} |" for field, kind, meaning in _fields(cls)]
    table = ["", "| field | type | meaning |", "|---|---|---|", *rows] if rows else []
    return "\n".join([f"### {name}", "", inspect.getdoc(cls) or "", *table, ""])


def _fields(cls: type[Event]) -> list[tuple[str, str, str]]:
    """Return name, type and the `#:` comment above it, for each field in the source."""
    found = []
    comment = ""
    for line in inspect.getsource(cls).splitlines():
        if text := re.fullmatch(r"    #: (.*)", line):
            comment = f"{comment} {text[1]}".strip()
        elif (field := re.fullmatch(r"    (\w+): (.+?)(?: = .*)?", line)) and field[1] != "type":
            found.append((field[1], _plain(field[2]), comment))
            comment = ""
    return found


def _plain(annotation: str) -> str:
    """Return a Python annotation in the words of JSON."""
    literal = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if literal:
        return " or ".join(f"`{choice}`" for choice in re.findall(r'"(.*?)"', literal[1]))
    words = re.sub(r"Sequence\[(\w+)\]", r"list of \1", annotation)
    words = re.sub(r"Mapping\[str, (\w+)\]", r"object of \1", words)
    return words.replace("Json", "object").replace(" | ", " or ").replace("None", "null")


if __name__ == "__main__":
    sys.stdout.write(page())
