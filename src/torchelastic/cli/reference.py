"""Generate the reference pages from the tables in the code.

`python -m torchelastic.cli.reference docs`; a test checks that the pages are current.
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
    JOB_COMMANDS,
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

All three take the same flags, torchrun's and ours. They differ only in these defaults:
"""


def _drawing(module: ModuleType) -> str:
    """Return the state diagram in a module's docstring: its indented part."""
    lines = inspect.cleandoc(module.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("    "))


_STATES_HEAD = f"""\
# States

## A world

One leader decides (`rendezvous/script_round.py`). The world that it publishes has one of these
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

## The workers of a node

`agent/lifecycle/script.py` decides. To stop workers, the agent sends SIGTERM to each worker's
process group, SIGKILL after `--shutdown-timeout`, and then ends every process the workers started.

```
{_drawing(script)}
```
"""

_RESIDENT_HEAD = f"""\
## Resident workers

Workers that have called `torchelastic.train` outlive their generation. Once the workers of all
nodes have called it, the world is *resident* and follows other rules
(`rendezvous/in_process_round.py`):

```
{_drawing(in_process_round)}
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
## Rules

**Spelling.** Names may use dashes or underscores and may be abbreviated while they stay
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
| `etcd_…`, `protocol`, `cacert`, `cert`, `key` | see [etcd](../concepts/rendezvous.md#at-etcd) |

Other keys are logged once and ignored; so are Bagua's flags.

**Counting devices.** torchelastic counts devices without torch. `gpu` counts NVIDIA devices in
`/dev` and `/proc`, or AMD devices in `/sys`, that `CUDA_VISIBLE_DEVICES` (`HIP_VISIBLE_DEVICES`)
does not hide. `xpu` counts Intel graphics devices in `/sys`. `cpu` counts the CPUs that this
process may use. `auto` is `gpu` if there is a GPU, else `cpu`.

**Local rank.** Workers get it in `LOCAL_RANK`, as with torchrun, torchelastic 0.2 and Bagua, and as
with `--use-env`. With `--no-use-env`, the script also gets `--local-rank=N`, as with
`torch.distributed.launch`.

**Bad input** is rejected before anything starts, with one sentence on stderr and exit code 2.
"""

_ENVIRONMENT_HEAD = f"""\
{_GENERATED}
# Environment variables

An empty variable counts as unset unless the table says otherwise.
"""

_SIDES = (
    ("worker", "Set for workers"),
    ("agent", "Read by the agent"),
    ("flag", "Defaults of flags"),
)


_HEADS_DEFAULTS = ("flag", *(f"`{defaults.prog}`" for defaults in JOB_COMMANDS))
_HEADS_FLAGS = ("flag", "default", "variable", "meaning")


def cli_page() -> str:
    """Return the text of `docs/reference/cli.md`."""
    parts = [_CLI_HEAD, _table(_HEADS_DEFAULTS, _differing_defaults())]
    for group in GROUPS:
        flags = [flag for flag in FLAGS if flag.group == group]
        parts += [f"## {group}\n", _table(_HEADS_FLAGS, map(_flag_row, flags))]
    parts.append(_CLI_TAIL)
    return "\n".join(parts)


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
                if name != flag.also_read
            ]
        parts += [f"## {title}\n", _table(("variable", "meaning"), rows)]
    return "\n".join(parts)


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
    residents = _table(("event", "what the node does"), handlers)
    return f"{_GENERATED}\n{_STATES_HEAD}\n{group}\n{_RESIDENT_HEAD}\n{residents}"


def _docstring(handler: Callable[..., object]) -> str:
    """Return the docstring on one line, for a table cell."""
    return " ".join((handler.__doc__ or "").split())


PAGES = {
    "reference/cli.md": cli_page,
    "reference/environment.md": environment_page,
    "concepts/states.md": states_page,
}


def _differing_defaults() -> Iterator[tuple[str, ...]]:
    for flag in FLAGS:
        defaults = [defaults.default(flag) for defaults in JOB_COMMANDS]
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
