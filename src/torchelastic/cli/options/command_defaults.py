"""The commands that take the flags of a job. Each has its own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchelastic.cli.options.flag import Flag


@dataclass(frozen=True)
class CommandDefaults:
    """The defaults of one command."""

    prog: str
    about: str
    defaults: Mapping[str, str] = field(default_factory=dict)
    #: Flags that only this command has.
    own_flags: tuple[Flag, ...] = ()

    def default(self, flag: Flag) -> str:
        """Return the default of a flag, as text."""
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
    "at an etcd server unless another rendezvous is given.",
    {
        "nproc_per_node": "auto",
        "rdzv_backend": "etcd",
        "max_restarts": "3",
        "monitor_interval": "5",
    },
)
#: Takes the same arguments as `run` and checks what `run` would do with them.
DOCTOR = CommandDefaults(
    "torchelastic doctor",
    "Check this machine, and a launch with these flags, before a long run.",
    own_flags=(
        Flag(
            name="--gpu",
            group="",
            pet=False,
            help="Also run small jobs on this machine's GPUs (CUDA in a forked worker, an NCCL "
            "all-reduce, its abort, torchelastic.train with a killed and a hung rank, a snapshot) "
            "and write a report to attach to an issue.",
        ),
        Flag(name="--json", group="", pet=False, help="Print the findings as JSON."),
    ),
)
JOB_COMMANDS = (RUN, DISTRIBUTED_RUN, DISTRIBUTED_LAUNCH)
