"""The declaration of a flag, and of a setting: a field of a config with its flag.

A setting is declared once, as a field of `LaunchConfig`:

    lease: float = setting(
        "--lease", group=ELASTICITY, metavar="SECONDS", convert=positive_seconds, default="3",
        help="Treat a node as failed when it is silent for this long.",
    )

That one place has its flag, variable, default, help and check. Others read it:

    the value of the field      `default`, converted
    the parser, `--help`, shell completion, docs/reference/cli.md and environment.md
                                `cli.flags.FLAGS`, which collects the flags of the fields
    the way into the config     `cli.planned_job`: flag and field have the same name, unless it
                                decides the field with others
    docs/reference/configuration.md    the field, and its comment or help
    other defaults of the code         `LaunchConfig.lease`
    nodes that must agree              `rendezvous.job_settings`: all with `shared=True`

Flags that are no field, such as `--standalone`, are declared in `cli.flags`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic.config.values import parse_truth
from torchelastic.errors import ConfigError

SHAPE = "Job shape"
RENDEZVOUS = "Rendezvous"
ELASTICITY = "Elasticity"
WORKERS = "Workers"
LOGS = "Logs"
COMPATIBILITY = "Compatibility"
GROUPS = (SHAPE, RENDEZVOUS, ELASTICITY, WORKERS, LOGS, COMPATIBILITY)

_SAME = object()


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag. Its name may also be written with underscores for its inner dashes."""

    name: str
    help: str
    #: One of `GROUPS` for a flag of a launch; empty for a flag of one command.
    group: str = ""
    #: Placeholder for the value in the help; empty for a switch, which takes none.
    metavar: str = ""
    convert: Callable[[str], Any] = parse_truth
    #: Value of the flag if it is given without one; empty: a value is required. The next word is
    #: taken as the value only if it matches `looks`: it could also be the script.
    alone: str = ""
    looks: re.Pattern[str] = re.compile("")
    #: As text; `convert` reads it like any other value.
    default: str = "0"
    #: Description of the default for the help, if its text is not clear.
    default_words: str = ""
    short: str = ""
    #: A flag of torchrun: its abbreviations win over those of other flags.
    torchrun: bool = False
    #: `PET_<NAME>` sets the default, if it is a flag of a launch.
    pet: bool = True
    #: Variable that is read if neither the flag nor its PET_ variable is set.
    also_read: str = ""
    #: A repeated flag adds to its earlier values.
    repeated: bool = False
    #: Accepted for old command lines; has no effect.
    ignored: bool = False
    #: All nodes of a job must have the same value.
    shared: bool = False
    #: For a flag of a launch that is no field: the fields it decides, and where its value goes if
    #: there are none; and the flag that it follows in the help, unless that is the one before it.
    fields: tuple[str, ...] = ()
    goes_to: str = ""
    after: str = ""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that set it, strongest first."""
        own = (f"PET_{self.dest.upper()}",) if self.pet and self.group else ()
        return (*own, self.also_read) if self.also_read else own


#: Every command has it; it belongs to no group.
HELP = Flag(name="--help", short="-h", torchrun=True, help="Show this text and exit.")


def setting(name: str, *, value: Any = _SAME, **declared: Any) -> Any:
    """Return a dataclass field with its flag. Its default is the flag's, converted, unless `value`
    is given: for a field that the flag does not set alone."""
    flag = Flag(name=name, **declared)
    if value is _SAME:
        value = flag.convert(flag.default)
    metadata = {"flag": flag}
    if isinstance(value, Mapping):
        return dataclasses.field(default_factory=lambda: dict(value), metadata=metadata)
    return dataclasses.field(default=value, metadata=metadata)


def flags_of(config: type) -> dict[str, Flag]:
    """Return the flag of each field that has one."""
    fields = dataclasses.fields(config)
    return {one.name: one.metadata["flag"] for one in fields if "flag" in one.metadata}


def convert(flag: Flag, source: str, text: str) -> Any:
    """Return the value of a flag; an error names its source."""
    try:
        return flag.convert(text)
    except ConfigError as error:
        raise ConfigError(f"{source} {error}") from None
