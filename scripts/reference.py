"""Generate the reference pages from the tables in the code.

`python -m scripts.reference`; a test checks that the pages are current.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.old_apis_page import old_apis_page
from torchelastic import env
from torchelastic.agent import node_loop
from torchelastic.agent.lifecycle import in_process, script
from torchelastic.cli import COMMANDS
from torchelastic.cli.command_table import (
    BY_NAME,
    DISTRIBUTED_LAUNCH,
    DISTRIBUTED_RUN,
    LAUNCHERS,
    RUN,
    Command,
)
from torchelastic.cli.flags import FLAGS, fields_of
from torchelastic.cli.help import default_words, spellings
from torchelastic.config import Grow, LaunchConfig, WorldSizes
from torchelastic.config.flag import GROUPS, Flag
from torchelastic.events import log
from torchelastic.events.types import EVENTS, Event
from torchelastic.rendezvous import decide as rounds

_GENERATED = "<!-- Written by `python -m scripts.reference`; do not edit. -->\n"

_CLI_HEAD = f"""\
{_GENERATED}
# The command line

`torchelastic --help` lists the commands, `torchelastic COMMAND --help` explains one.

@COMMANDS@
**Shell completion.** `torchelastic --print-completion SHELL` prints a script for bash, zsh or tcsh
that completes commands and their flags. It needs no other package. For bash, put this line in
`~/.bashrc`; for zsh, write `zsh` and put it in `~/.zshrc`, after `compinit`:

```bash
eval "$(torchelastic --print-completion bash)"
```

## Launching a job

    {RUN.prog} [flags] SCRIPT [arguments of the script]
    {DISTRIBUTED_RUN.prog} [flags] SCRIPT [arguments of the script]
    {DISTRIBUTED_LAUNCH.prog} [flags] SCRIPT [arguments of the script]

All three take the same flags, torchrun's and ours. They differ only in these defaults:
"""
_OTHERS_HEAD = """\
## The other commands

JOB is a job id, the beginning of one, or the `--log-dir` of a run. Without it, the commands use the
running job, or else the last one; `status` shows all.
"""


def _drawing(module: ModuleType, number: int = 0) -> str:
    """Return a state diagram in a module's docstring: an indented paragraph."""
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    return [text for text in paragraphs if text.startswith("    ")][number]


_STATES_HEAD = f"""\
# States

## A world

One leader decides (`rendezvous/decide.py`). The world that it publishes has one of these
phases:

```
{_drawing(rounds)}
```

| phase | what agents do |
| --- | --- |
| waiting | wait for more nodes or for `--settle`; stop workers that still run, as in over |
| agreeing | store the world and confirm it; no worker starts before a majority has confirmed |
| running | member nodes start their workers; other nodes warm up or are spares |
| over | stop the workers, then report *gone* |
| closed | stop the workers, then exit with the world's exit code |

## A node

Every node has one loop (`agent/node_loop.py`): it takes an event, lets the machine decide
(`agent/lifecycle/machine.py`), and performs the commands.

```
{_drawing(node_loop)}
```

The node's own part, such as leaving, its lease and its end, is in `agent/lifecycle/node_state.py`.
What it means for the workers is in one of two tables: `script.py` while they end with their
generation, `in_process.py` once they outlive it. An agent holds child processes, a process without
a launcher (`training/standalone.py`) holds itself. The plug-in for torchrun has no such loop: torch
starts and stops the workers there; `compat/torchrun/launcher_node_state.py` answers what it asks.

## The workers of a script

`agent/lifecycle/script.py` decides. To stop workers, the agent sends SIGTERM to each worker's
process group, SIGKILL after `--shutdown-timeout`, and then ends every process the workers started.

```
{_drawing(script)}
```
"""

_IN_PROCESS_HEAD = f"""\
## In-process workers

Workers that have called `torchelastic.train` outlive their generation. Once the workers of all
nodes have called it, the world is *in-process* and follows other rules
(`rendezvous/decide.py`):

```
{_drawing(rounds, 1)}
```

| phase | what agents do |
| --- | --- |
| running | tell the workers to enter this world, at once or after an agreed step |
| pausing | ask the workers which step they have entered, and report the largest |
| over | tell the workers to abort and roll back, or to stop after an agreed step; report *gone* |
| waiting, closed | as above |

On a node, `agent/lifecycle/in_process.py` decides. The states of a worker:

```
{_drawing(in_process)}
```
"""

_CLI_TAIL = """\
### Rules

**Spelling.** Names of flags may use dashes or underscores and may be abbreviated while they stay
unambiguous. If an abbreviation matches a flag of torchrun and one of ours, torchrun's wins.
`--flag VALUE` and `--flag=VALUE` are the same. The first word that is not a flag is the script;
everything after it is passed to the script. `${local_rank}` in it is replaced with the worker's
local rank. `--dashboard` may be given without a value: the next word is its value only if it is a
port, `HOST:PORT` or `auto`.

**Precedence.** A flag wins over its variable, a variable over the default. An empty variable counts
as unset. `-j` and `--nnodes` (or `--nproc-per-node`) exclude each other.

**Choice of the rendezvous.** `--rdzv-backend` sets it. Without that flag, it is `static` if
`--node-rank` is given, or `--master-addr` or `--master-port` without `--rdzv-endpoint`. If no
address is given at all, it is private to the node, which is enough for one node. Otherwise it is
the command's default. A `static` rendezvous of one node without endpoint and `--master-port` is
private, as with torchrun; so is an endpoint with port 0. `etcd`, `etcd-v2` and `etcd-v3` all use
etcd's v3 API. With `--standalone` or port 0, the agent starts its own etcd beside the job.

**`--master-addr` and `--master-port`** set where the nodes of a `static` rendezvous meet. Workers
also reach torch's store there: the agent forwards connections to the store of the current
generation, so `init_process_group("tcp://HOST:PORT")` works as with torchrun. With one node,
`MASTER_ADDR` and `MASTER_PORT` are the given values. With several nodes, they are the address of
that store itself, which is still available after the node at `--master-addr` is lost.

**Job id.** `--rdzv-id` sets it, also with `--standalone`. Without that flag, a job of one node gets
a unique id, and a job of several nodes gets `job-PORT`: the nodes share only the endpoint, and may
spell its host differently. Set an id if several jobs use the same port one after the other. With
etcd, jobs of several nodes must set one.

**Timeouts.** `--settle`, `--lease` and `--wait-for-nodes` win over the keys of `--rdzv-conf`:

| key | sets |
|---|---|
| `last_call_timeout` | `--settle` |
| `keep_alive_interval` times `keep_alive_max_attempt` | `--lease`; they default to 5 and 3 |
| `join_timeout`, else `timeout` | `--wait-for-nodes` |
| `is_host` | if this node hosts the rendezvous, instead of detecting it |
| `own_endpoint` | which endpoint is this node's, where several nodes share an address |
| `etcd_…`, `protocol`, `cacert`, `cert`, `key` | see [etcd](../concepts/rendezvous.md#at-etcd) |

Other keys are logged once and ignored; so are Bagua's flags.

**Counting devices.** torchelastic counts devices without torch. `gpu` counts NVIDIA devices in
`/dev` and `/proc`, or AMD devices in `/sys`, that `CUDA_VISIBLE_DEVICES` (`HIP_VISIBLE_DEVICES`)
does not hide. `xpu` counts Intel graphics devices in `/sys`. `cpu` counts the CPUs that this
process may use. `auto` is `gpu` if there is a GPU, else `cpu`.

**Local rank.** Workers get it in `LOCAL_RANK`, as with torchrun, torchelastic 0.2 and Bagua, and as
with `--use-env`. With `--no-use-env`, the script also gets `--local-rank=N`, as with
`torch.distributed.launch`.

**Bad input** is rejected before anything starts, with one sentence on stderr and exit code 64.
"""

_ENVIRONMENT_HEAD = f"""\
{_GENERATED}
# Environment variables

An empty variable counts as unset unless the table says otherwise.
"""

_CONFIGURATION_HEAD = f"""\
{_GENERATED}
# Configuration

A job is described by a `LaunchConfig`: `torchelastic run` makes one from its flags, and a Python
program passes one to [`elastic_launch`](../guides/python.md). [The command line](cli.md) explains
each flag. Fields without a flag are set by torchelastic.
"""
_WITHOUT_HEAD = """\
## Flags without a field
"""
_SIDES = (
    ("worker", "Set for workers"),
    ("agent", "Read by the agent"),
    ("flag", "Defaults of flags"),
)

_EVENTS_HEAD = f"""\
{_GENERATED}
# Events

Every agent writes what happens, and why, to a file `events.jsonl`: one JSON object per line, each
written immediately. With `--log-dir` the file is in the run directory, otherwise next to the
agent's entry under `$XDG_RUNTIME_DIR/torchelastic` (see [logs](../guides/logs.md)).
`torchelastic status` prints its path. `--event-log-handler console` prints the same lines on
stderr.

At {log.MAX_BYTES // 2**20} MiB the file is rotated to `events.jsonl.1`. That file begins with the
events of the previous `events.jsonl.1`, without `progress`, `checkpoint-stored` and
`weights-hashed`, up to a quarter of the size.
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

_HEADS_DEFAULTS = ("flag", *(f"`{defaults.prog}`" for defaults in LAUNCHERS))
_HEADS_FLAGS = ("flag", "default", "variable", "meaning")


def cli_page() -> str:
    """Return the text of `docs/reference/cli.md`."""
    names = ((f"`torchelastic {name}`", summary) for name, summary in COMMANDS.items())
    head = _CLI_HEAD.replace("@COMMANDS@", _table(("command", "to"), names))
    parts = [head, _table(_HEADS_DEFAULTS, _differing_defaults())]
    for group in GROUPS:
        flags = [flag for flag in FLAGS if flag.group == group]
        parts += [f"### {group}\n", _table(_HEADS_FLAGS, map(_flag_row, flags))]
    parts += [_CLI_TAIL, _OTHERS_HEAD]
    parts += [_own_section(command) for command in BY_NAME.values() if command is not RUN]
    return "\n".join(parts)


def _own_section(command: Command) -> str:
    """Return the section of a command that has flags of its own."""
    rows = [(name, value, text) for name, value, _, text in map(_flag_row, command.own_flags)]
    table = _table(("flag", "default", "meaning"), rows) if rows else ""
    also = ["All flags of `torchelastic run` are accepted, too."] if command.launches else []
    text = "\n\n".join([command.about, *also, *command.epilog.splitlines()[:1]])
    return f"### {command.prog}\n\n    {command.usage}\n\n{text}\n\n{table}"


def environment_page() -> str:
    """Return the text of `docs/reference/environment.md`."""
    parts = [_ENVIRONMENT_HEAD]
    for side, title in _SIDES:
        rows = [(f"`{one.name}`", one.meaning) for one in env.VARIABLES if one.side == side]
        if side == "flag":
            rows += [
                (f"`{name}`", f"default of `{flag.name}`")
                for flag in FLAGS
                for name in flag.variables
            ]
        parts += [f"## {title}\n", _table(("variable", "meaning"), rows)]
    return "\n".join(parts)


def configuration_page() -> str:
    """Return the text of `docs/reference/configuration.md`."""
    comments = _field_comments()
    rows = []
    for field in dataclasses.fields(LaunchConfig):
        flags = [flag for flag in FLAGS if field.name in fields_of(flag)]
        meaning = comments.get(field.name) or (flags[-1].help if flags else "")
        names = ", ".join(f"`{flag.name}`" for flag in flags)
        rows.append((f"`{field.name}`", f"`{field.type}`", f"`{_default(field)}`", names, meaning))
    without = ((f"`{flag.name}`", flag.goes_to) for flag in FLAGS if flag.goes_to)
    others = _table(("flag", "where its value goes"), without)
    fields = _table(("field", "type", "default", "flag", "meaning"), rows)
    return f"{_CONFIGURATION_HEAD}\n{fields}\n{_WITHOUT_HEAD}\n{others}"


def _field_comments() -> dict[str, str]:
    """Return the `#:` comments of the fields, by field."""
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in map(str.strip, inspect.getsource(LaunchConfig).splitlines()):
        if line.startswith("#: ") or (comment and line.startswith("#")):
            comment.append(line.removeprefix("#:").strip())
        elif comment:
            found[line.partition(":")[0]] = " ".join(comment)
            comment = []
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    value = field.default
    if isinstance(value, Grow | WorldSizes):
        return f"{type(value).__name__}()"
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def states_page() -> str:
    """Return the text of `docs/concepts/states.md`."""
    rows = (
        (phase.value, event.__name__, _docstring(handler))
        for (phase, event), handler in script.TRANSITIONS.items()
    )
    group = _table(("while", "event", "what the node does"), rows)
    handlers = (
        (event.__name__, _docstring(handler)) for event, handler in in_process.HANDLERS.items()
    )
    serving = _table(("event", "what the node does"), handlers)
    return f"{_GENERATED}\n{_STATES_HEAD}\n{group}\n{_IN_PROCESS_HEAD}\n{serving}"


def _docstring(handler: Callable[..., object]) -> str:
    """Return the docstring on one line, for a table cell."""
    return " ".join((handler.__doc__ or "").split())


def events_page() -> str:
    """Return the text of `docs/reference/events.md`."""
    sections = [_event_section(name, cls) for name, cls in EVENTS.items()]
    return "\n".join([_EVENTS_HEAD, *sections])


def _event_section(name: str, cls: type[Event]) -> str:
    rows = [f"| `{field}` | {kind} | {meaning} |" for field, kind, meaning in event_fields(cls)]
    table = ["", "| field | type | meaning |", "|---|---|---|", *rows] if rows else []
    return "\n".join([f"### {name}", "", inspect.getdoc(cls) or "", *table, ""])


def event_fields(cls: type[Event]) -> list[tuple[str, str, str]]:
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


PAGES = {
    "reference/cli.md": cli_page,
    "reference/configuration.md": configuration_page,
    "reference/environment.md": environment_page,
    "reference/old-apis.md": lambda: f"{_GENERATED}\n{old_apis_page(_table)}",
    "reference/events.md": events_page,
    "concepts/states.md": states_page,
}


def _differing_defaults() -> Iterator[tuple[str, ...]]:
    for flag in FLAGS:
        defaults = [defaults.default(flag) for defaults in LAUNCHERS]
        if len(set(defaults)) > 1:
            yield (f"`{flag.name}`", *(f"`{default}`" for default in defaults))


def _flag_row(flag: Flag) -> tuple[str, ...]:
    default = default_words(flag, RUN)
    shown = default if flag.default_words or not default else f"`{default}`"
    variables = ", ".join(f"`{name}`" for name in flag.variables)
    return (f"`{spellings(flag)}`", shown, variables, flag.help)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    for name, page in PAGES.items():
        Path("docs", name).write_text(page())
