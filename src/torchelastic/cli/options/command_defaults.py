"""The commands that take a job: all have the same flags, each has defaults of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchelastic.cli.options.flag import Flag


@dataclass(frozen=True)
class CommandDefaults:
    """One of the commands: the same flags with defaults of its own."""

    prog: str
    about: str
    defaults: Mapping[str, str] = field(default_factory=dict)
    #: Those that only this command has.
    own_flags: tuple[Flag, ...] = ()

    def default(self, flag: Flag) -> str:
        """The default of a flag, as text."""
        return self.defaults.get(flag.dest, flag.default)


RUN = CommandDefaults("torchelastic run", "Run a script in every worker of an elastic job.")
DISTRIBUTED_RUN = CommandDefaults(
    "python -m torchelastic.distributed.run",
    "The same as `torchelastic run`, with the defaults of Bagua's launcher.",
    {
        "nproc_per_node": "auto",
        "rdzv_backend": "static",
        "max_restarts": "3",
        "monitor_interval": "5",
    },
)
DISTRIBUTED_LAUNCH = CommandDefaults(
    "python -m torchelastic.distributed.launch",
    "The same as `torchelastic run`, with the defaults of torchelastic 0.2: several nodes meet "
    "at an etcd server unless another rendezvous is named.",
    {
        "nproc_per_node": "auto",
        "rdzv_backend": "etcd",
        "max_restarts": "3",
        "monitor_interval": "5",
    },
)
#: Runs nothing: what it is asked about is what `run` would do with the same words.
DOCTOR = CommandDefaults(
    "torchelastic doctor",
    "Check this machine, and the launch that the flags describe, before a long run.",
    own_flags=(
        Flag(
            name="--gpu",
            group="",
            pet=False,
            help="Also run small jobs on the GPUs of this machine (a forked worker that uses CUDA, "
            "an all-reduce of NCCL, its abort, torchelastic.train with a killed and with a hung "
            "rank, a snapshot), and write a report to attach to an issue.",
        ),
        Flag(name="--json", group="", pet=False, help="Print the findings for a program to read."),
    ),
)
FLAVOURS = (RUN, DISTRIBUTED_RUN, DISTRIBUTED_LAUNCH)
