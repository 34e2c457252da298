"""The flags of a launch, in the order of the help.

Most are settings: fields of `LaunchConfig`, declared there with `config.flag.setting`. Declared
here are the flags that are no field, or that decide several.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchelastic.config import LaunchConfig, parse_nnodes, parse_shape, values
from torchelastic.config.flag import (
    COMPATIBILITY,
    GROUPS,
    RENDEZVOUS,
    SHAPE,
    WORKERS,
    Flag,
    flags_of,
)
from torchelastic.hosts.host_list import parse_hosts

_FROM_HERE = "the command itself: it starts an agent on each host"
_ENTRY = "the entry point, not the configuration"
_ARGUMENTS = "the arguments of the script"


def _hosts(given: str) -> object:
    return parse_hosts(given.split(","))


def _of_bagua(name: str, metavar: str = "") -> Flag:
    return Flag(
        name=name,
        group=COMPATIBILITY,
        metavar=metavar,
        convert=values.text,
        default="",
        pet=False,
        ignored=True,
        help="A flag of Bagua; logged and ignored.",
    )


_NO_FIELDS = (
    Flag(
        name="--shape",
        short="-j",
        group=SHAPE,
        fields=("min_nodes", "max_nodes", "nproc_per_node"),
        metavar="[MIN:]NODESxPROCS",
        convert=values.optional(parse_shape),
        default="",
        help="Number of nodes and workers per node: 2x8, or 1:4x8 for one to four nodes.",
    ),
    Flag(
        name="--nnodes",
        group=SHAPE,
        fields=("min_nodes", "max_nodes"),
        metavar="N|MIN:MAX",
        convert=parse_nnodes,
        default=f"{LaunchConfig.min_nodes}:{LaunchConfig.max_nodes}",
        torchrun=True,
        help="Number of nodes, or the MIN:MAX range that the job can run with.",
    ),
    Flag(
        name="--nproc-per-node",
        group=SHAPE,
        fields=("nproc_per_node",),
        metavar="N",
        convert=values.workers,
        default=str(LaunchConfig.nproc_per_node),
        torchrun=True,
        help="Workers on this node: a number; gpu, xpu or cpu for one per device; or auto (one "
        "per GPU, or one per CPU if there is no GPU). Nodes may differ.",
    ),
    Flag(
        name="--hosts",
        after="--role",
        group=SHAPE,
        goes_to=_FROM_HERE,
        metavar="HOST[:N],...",
        convert=_hosts,
        default="",
        help="Run the whole job from here: start an agent with N workers on each host, over ssh. "
        "Hosts need the same Python and the same files at the same paths. --nnodes defaults to "
        "1:HOSTS.",
    ),
    Flag(
        name="--hosts-from",
        group=SHAPE,
        goes_to=_FROM_HERE,
        metavar="FILE|COMMAND",
        convert=values.text,
        default="",
        help="The same, with the hosts from a file, or from a command that prints them: one "
        "HOST[:N] per line. It is read again every second; hosts join and leave the running job.",
    ),
    Flag(
        name="--standalone",
        after="--rdzv-tls-ca",
        group=RENDEZVOUS,
        goes_to="`max_nodes=1` and an empty `rdzv_endpoint`",
        torchrun=True,
        help="Run on one node with a private rendezvous, whatever the other flags say.",
    ),
    Flag(
        name="--master-addr",
        after="--node-rank",
        group=RENDEZVOUS,
        goes_to='the host of `rdzv_endpoint`, with `rdzv_backend="static"`',
        metavar="HOST",
        convert=values.host,
        default="127.0.0.1",
        torchrun=True,
        help="Host of node 0 in a static rendezvous without --rdzv-endpoint.",
    ),
    Flag(
        name="--master-port",
        group=RENDEZVOUS,
        goes_to='the port of `rdzv_endpoint`, with `rdzv_backend="static"`',
        metavar="PORT",
        convert=values.port,
        default="",
        default_words="29500",
        torchrun=True,
        help="Port on that host.",
    ),
    Flag(
        name="--module",
        after="--preflight",
        short="-m",
        group=WORKERS,
        goes_to=_ENTRY,
        torchrun=True,
        help="SCRIPT is a module; run it like `python -m`.",
    ),
    Flag(
        name="--no-python",
        group=WORKERS,
        goes_to=_ENTRY,
        torchrun=True,
        help="SCRIPT is a program; run it without Python.",
    ),
    Flag(
        name="--run-path",
        group=WORKERS,
        goes_to=_ENTRY,
        torchrun=True,
        help="SCRIPT is a script, even with --no-python or --module.",
    ),
    Flag(
        name="--print-completion",
        after="--dashboard-token-file",
        group=COMPATIBILITY,
        goes_to="nowhere: prints a script and exits",
        metavar="SHELL",
        convert=values.optional(values.one_of("bash", "zsh", "tcsh")),
        default="",
        default_words="none",
        torchrun=True,
        pet=False,
        help="Print a completion script for bash, zsh or tcsh and exit. Needs no other package.",
    ),
    Flag(
        name="--logs-specs",
        after="--monitor-interval",
        group=COMPATIBILITY,
        goes_to="nowhere: only `default` is supported",
        metavar="NAME",
        convert=values.optional(values.one_of("default")),
        default="",
        default_words="default",
        torchrun=True,
        pet=False,
        help="torchrun's log plug-in; only `default` is supported.",
    ),
    Flag(
        name="--use-env",
        group=COMPATIBILITY,
        goes_to=_ARGUMENTS,
        pet=False,
        help="Pass the local rank to workers only as LOCAL_RANK, which is the default here.",
    ),
    Flag(
        name="--no-use-env",
        group=COMPATIBILITY,
        goes_to=_ARGUMENTS,
        pet=False,
        help="Also pass --local-rank=N to the script, as torch.distributed.launch does without "
        "--use-env.",
    ),
    _of_bagua("--bagua-service-port", "PORT"),
    _of_bagua("--default-bucket-size", "BYTES"),
    _of_bagua("--autotune-level", "N"),
    _of_bagua("--autotune-max-samples", "N"),
    _of_bagua("--autotune-sampling-confidence-time", "SECONDS"),
    _of_bagua("--autotune-warmup-time", "SECONDS"),
    _of_bagua("--is-output-autotune-log"),
    _of_bagua("--enable-bagua-net"),
    _of_bagua("--bagua-net-switch-on"),
)


def _in_order(settings: Iterable[Flag], others: Iterable[Flag]) -> tuple[Flag, ...]:
    """Put the other flags between those of the settings: each behind its `after`, or else behind
    the one before it."""
    found, place = list(settings), 0
    for flag in others:
        if flag.after:
            place = [one.name for one in found].index(flag.after) + 1
        found.insert(place, flag)
        place += 1
    return tuple(sorted(found, key=lambda flag: GROUPS.index(flag.group)))


#: By field of `LaunchConfig`.
SETTINGS = flags_of(LaunchConfig)
FLAGS = _in_order(SETTINGS.values(), _NO_FIELDS)


def fields_of(flag: Flag) -> tuple[str, ...]:
    """Return the fields of `LaunchConfig` that a flag sets."""
    return flag.fields or tuple(name for name, one in SETTINGS.items() if one is flag)
