"""Flags for command lines written for torchrun, torch.distributed.launch and Bagua."""

from __future__ import annotations

from torchelastic.cli.options import values
from torchelastic.cli.options.flag import COMPATIBILITY, Flag

_TORCHS_FLAGS = (
    Flag(
        name="--print-completion",
        group=COMPATIBILITY,
        metavar="SHELL",
        convert=values.optional(values.one_of("bash", "zsh", "tcsh")),
        default="",
        default_words="none",
        torchrun=True,
        pet=False,
        help="Print a completion script for bash, zsh or tcsh and exit. Needs no other package.",
    ),
    Flag(
        name="--monitor-interval",
        group=COMPATIBILITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="0.1",
        torchrun=True,
        help="Accepted, but not needed: workers are watched, not polled.",
    ),
    Flag(
        name="--logs-specs",
        group=COMPATIBILITY,
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
        pet=False,
        help="Pass the local rank to workers only as LOCAL_RANK, which is the default here.",
    ),
    Flag(
        name="--no-use-env",
        group=COMPATIBILITY,
        pet=False,
        help="Also pass --local-rank=N to the script, as torch.distributed.launch does without "
        "--use-env.",
    ),
)


def _bagua(name: str, metavar: str = "") -> Flag:
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


_BAGUA_FLAGS = (
    _bagua("--bagua-service-port", "PORT"),
    _bagua("--default-bucket-size", "BYTES"),
    _bagua("--autotune-level", "N"),
    _bagua("--autotune-max-samples", "N"),
    _bagua("--autotune-sampling-confidence-time", "SECONDS"),
    _bagua("--autotune-warmup-time", "SECONDS"),
    _bagua("--is-output-autotune-log"),
    _bagua("--enable-bagua-net"),
    _bagua("--bagua-net-switch-on"),
)

OLD_FLAGS: tuple[Flag, ...] = (*_TORCHS_FLAGS, *_BAGUA_FLAGS)
