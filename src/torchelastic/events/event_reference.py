"""Makes the page of events.

`python -m torchelastic.events.event_reference > docs/reference/events.md`
"""

from __future__ import annotations

import inspect
import re
import sys

from torchelastic.events import log
from torchelastic.events.types import EVENTS, Event

_HEAD = """\
# Events

<!-- Made from events/types.py; do not edit:
`python -m torchelastic.events.event_reference > docs/reference/events.md` -->

Every agent writes what happens, and why, to a file `events.jsonl`: one JSON object per line, each
written at once. With `--log-dir` the file lies in the run directory, otherwise beside the agent's
entry under `$XDG_RUNTIME_DIR/torchelastic` (see [logs](../guides/logs.md));
`torchelastic status` names it and reads it. `--event-log-handler console` shows the same lines on
stderr. At {size} MiB the file becomes `events.jsonl.1`; of an older one all but `progress` and
`checkpoint-stored` is kept at the beginning of that, up to a quarter of the size. That is done
beside the job; until the disk has done it there is an `events.jsonl.0` as well. Beside its own log
the leader of the job keeps `job.jsonl`, the events of all agents as far as they have reached it.

```sh
jq -r 'select(.type == "generation-over") | "\\(.generation): \\(.reason)"' events.jsonl
```

Every line has:

| field | type | meaning |
|---|---|---|
| `v` | int | version of this format: 1 |
| `type` | str | what happened, see below |
| `job` | str | the job id |
| `node` | str | id of the agent that writes |
| `wall` | float | wall clock, seconds since 1970: for people |
| `mono` | float | monotonic clock of the machine: orders the events of all its agents |
| `generation` | int or null | the generation meant, where one is |
| `heard` | float | in `job.jsonl`: when that was by the leader's `mono`, as it estimates |

Readers skip types and fields they do not know, and lines they cannot parse: the last line of a
machine that lost its power may be half a line.

## Types
"""


def page() -> str:
    """The whole page."""
    sections = [_section(name, cls) for name, cls in EVENTS.items()]
    return "\n".join([_HEAD.format(size=log.MAX_BYTES // 2**20), *sections])


def _section(name: str, cls: type[Event]) -> str:
    rows = [f"| `{field}` | {kind} | {meaning} |" for field, kind, meaning in _fields(cls)]
    table = ["", "| field | type | meaning |", "|---|---|---|", *rows] if rows else []
    return "\n".join([f"### {name}", "", inspect.getdoc(cls) or "", *table, ""])


def _fields(cls: type[Event]) -> list[tuple[str, str, str]]:
    """Name, type and the `#:` comment above it, as they stand in the source."""
    found = []
    comment = ""
    for line in inspect.getsource(cls).splitlines():
        if said := re.fullmatch(r"    #: (.*)", line):
            comment = said[1]
        elif (field := re.fullmatch(r"    (\w+): (.+?)(?: = .*)?", line)) and field[1] != "type":
            found.append((field[1], _plain(field[2]), comment))
            comment = ""
    return found


def _plain(annotation: str) -> str:
    """A Python annotation in words for readers of JSON."""
    literal = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if literal:
        return " or ".join(f"`{choice}`" for choice in re.findall(r'"(.*?)"', literal[1]))
    words = re.sub(r"Sequence\[(\w+)\]", r"list of \1", annotation)
    words = re.sub(r"Mapping\[str, (\w+)\]", r"object of \1", words)
    return words.replace("Json", "object").replace(" | ", " or ").replace("None", "null")


if __name__ == "__main__":
    sys.stdout.write(page())
