"""Writes the reference pages from the tables in the code.

`python -m torchelastic.cli.reference docs`; a test compares the pages with what this would write.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from torchelastic import env
from torchelastic.agent.lifecycle import in_process, script
from torchelastic.cli.options.command_defaults import (
    DISTRIBUTED_LAUNCH,
    DISTRIBUTED_RUN,
    FLAVOURS,
    RUN,
)
from torchelastic.cli.options.flag import GROUPS, Flag
from torchelastic.cli.options.flags import FLAGS
from torchelastic.cli.options.help import default_words, spellings
from torchelastic.rendezvous import in_process_round
from torchelastic.rendezvous import script_round as rounds

_GENERATED = "<!-- Written by `python -m torchelastic.cli.reference docs`; do not edit. -->\n"

_CLI_HEAD = f"""\
{_GENERATED}
# The command line

    {RUN.prog} [flags] SCRIPT [arguments of the script]
    {DISTRIBUTED_RUN.prog} [flags] SCRIPT [arguments of the script]
    {DISTRIBUTED_LAUNCH.prog} [flags] SCRIPT [arguments of the script]

All three understand the same flags, torchrun's and ours; they differ in these defaults:
"""


def _drawing(module: ModuleType) -> str:
    """The state diagram in a module's docstring: the part of it that is indented."""
    lines = inspect.cleandoc(module.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("    "))


_STATES_HEAD = f"""\
# States

## A world

One leader decides (`rendezvous/script_round.py`). The world it publishes is in one of these phases:

```
{_drawing(rounds)}
```

| phase | what agents do |
| --- | --- |
| waiting | too few nodes are there, or not settled yet: stop workers that are left, as in over |
| agreeing | take it up and say so: no worker starts before a majority has it |
| running | those with a place in it start their workers; others warm up, or are spares |
| over | stop the workers, then report *gone* |
| closed | stop the workers, then end with the world's exit code |

## The workers of a node

`agent/lifecycle/script.py` decides. Stopping is SIGTERM to every worker's process group, SIGKILL
after `--shutdown-timeout`, and an end for whatever the workers had started.

```
{_drawing(script)}
```
"""

_CREW_HEAD = f"""\
## Resident workers

Workers that have called `torchelastic.train` outlive their generation. When those of all nodes
have, the world is *resident*, and other rules hold (`rendezvous/in_process_round.py`):

```
{_drawing(in_process_round)}
```

| phase | what agents do |
| --- | --- |
| running | tell their workers of it to enter it, at once or after an agreed step |
| pausing | ask their workers which step they have entered, and report the largest |
| over | tell their workers to abort and roll back, or to stop after an agreed step; report *gone* |
| waiting, closed | as above |

On a node, `agent/lifecycle/in_process.py` decides. A worker's life:

```
{_drawing(in_process)}
```
"""

_CLI_TAIL = """\
## Rules

**Spelling.** A name may be written with dashes or underscores, and abbreviated as long as it stays
unambiguous; where an abbreviation fits a flag of torchrun's and one of ours, torchrun's is meant.
`--flag VALUE` and `--flag=VALUE` are the same. Flags end at the first word that is none: that is
the script, and the rest belongs to it. `${local_rank}` in the rest becomes the worker's local rank.
The value of `--dashboard` may be left out: the next word is its value if it looks like one, a port,
`HOST:PORT` or `auto`.

**Precedence.** A flag wins over its variable, a variable over the default. An empty variable counts
as unset. `-j` and `--nnodes` (or `--nproc-per-node`) exclude each other.

**Which rendezvous.** The one named by `--rdzv-backend`. Where none is named: `static` if
`--node-rank` is given, or `--master-addr` or `--master-port` without `--rdzv-endpoint`; a private
one if no address is given at all, which is enough for one node; else the command's default. A
`static` rendezvous of one node without endpoint and `--master-port` is private, as with torchrun,
and so is an endpoint with port 0. `etcd`, `etcd-v2` and `etcd-v3` are one: etcd's v3 API, whichever
name is used; with `--standalone` or port 0 an etcd is started beside the job.

**`--master-addr` and `--master-port`** name the place where nodes of a `static` rendezvous meet.
Workers find torch's store there, too, so `init_process_group("tcp://HOST:PORT")` works as with
torchrun: the agent passes them on to the store of the current generation. With one node
`MASTER_ADDR` and `MASTER_PORT` are the given values; with several they name that store itself,
which is still there after the node at `--master-addr` is lost.

**Job id.** `--rdzv-id` where given, also with `--standalone`. Otherwise a job of one node gets a
unique one. Nodes that are to meet need the same id and have only the endpoint in common, so theirs
is `job-PORT`: the host is left out because nodes may spell it differently. Give an id to tell jobs
apart that use the same port one after the other. At an etcd server several nodes must give one.

**Times.** `--settle`, `--lease` and `--wait-for-nodes` win over the keys of `--rdzv-conf`:

| key | means |
|---|---|
| `last_call_timeout` | `--settle` |
| `keep_alive_interval` times `keep_alive_max_attempt` | `--lease`; one not given counts 5 or 3 |
| `join_timeout`, else `timeout` | `--wait-for-nodes` |
| `is_host` | whether this node hosts the rendezvous, instead of finding out |
| `etcd_…`, `protocol`, `cacert`, `cert`, `key` | [for etcd](../concepts/rendezvous.md#at-etcd) |

Other keys are named once in the log and ignored; so are Bagua's flags.

**Counting devices.** torch is not asked. `gpu` counts NVIDIA devices in `/dev` and `/proc`, or AMD
devices in `/sys`, as far as `CUDA_VISIBLE_DEVICES` (`HIP_VISIBLE_DEVICES`) shows them; `xpu` counts
Intel graphics devices in `/sys`; `cpu` counts the CPUs this process may use. `auto` is `gpu` where
there is one, else `cpu`.

**Local rank.** Workers find it in `LOCAL_RANK`, as with torchrun, torchelastic 0.2 and Bagua;
`--use-env` asks for just that. A script that wants it as an argument, as
`torch.distributed.launch` passes it, gets `--local-rank=N` with `--no-use-env`.

**Bad input** is refused before anything has started, in one sentence on stderr, with exit code 2.
"""

_ENVIRONMENT_HEAD = f"""\
{_GENERATED}
# Environment variables

An empty variable counts as unset, unless said otherwise.
"""

_SIDES = (
    ("worker", "Given to workers"),
    ("agent", "Read by the agent"),
    ("flag", "Read for the default of a flag"),
)


_HEADS_DEFAULTS = ("flag", *(f"`{defaults.prog}`" for defaults in FLAVOURS))
_HEADS_FLAGS = ("flag", "default", "variable", "meaning")


def cli_page() -> str:
    """The text of `docs/reference/cli.md`."""
    parts = [_CLI_HEAD, _table(_HEADS_DEFAULTS, _differing_defaults())]
    for group in GROUPS:
        flags = [flag for flag in FLAGS if flag.group == group]
        parts += [f"## {group}\n", _table(_HEADS_FLAGS, map(_flag_row, flags))]
    parts.append(_CLI_TAIL)
    return "\n".join(parts)


def environment_page() -> str:
    """The text of `docs/reference/environment.md`."""
    parts = [_ENVIRONMENT_HEAD]
    for side, title in _SIDES:
        rows = [(f"`{one.name}`", one.meaning) for one in env.VARIABLES if one.side == side]
        if side == "flag":
            rows += [
                (f"`{name}`", f"default of `{flag.name}`")
                for flag in FLAGS
                for name in flag.variables
                if name != flag.also_read
            ]
        parts += [f"## {title}\n", _table(("variable", "meaning"), rows)]
    return "\n".join(parts)


def states_page() -> str:
    """The text of `docs/concepts/states.md`."""
    rows = (
        (phase.value, event.__name__, _docstring(handler))
        for (phase, event), handler in script.TRANSITIONS.items()
    )
    group = _table(("while", "event", "what the node does"), rows)
    handlers = (
        (event.__name__, _docstring(handler)) for event, handler in in_process.HANDLERS.items()
    )
    residents = _table(("event", "what the node does"), handlers)
    return f"{_GENERATED}\n{_STATES_HEAD}\n{group}\n{_CREW_HEAD}\n{residents}"


def _docstring(handler: Callable[..., object]) -> str:
    """On one line, for a cell of a table."""
    return " ".join((handler.__doc__ or "").split())


PAGES = {
    "reference/cli.md": cli_page,
    "reference/environment.md": environment_page,
    "concepts/states.md": states_page,
}


def _differing_defaults() -> Iterator[tuple[str, ...]]:
    for flag in FLAGS:
        defaults = [defaults.default(flag) for defaults in FLAVOURS]
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


def main(argv: list[str]) -> int:
    for name, page in PAGES.items():
        Path(argv[0], name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["docs"]))
