"""The `Flag` record. `flags` is the table of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchelastic.config import parse_truth

SHAPE = "Job shape"
RENDEZVOUS = "Rendezvous"
ELASTICITY = "Elasticity"
WORKERS = "Workers"
LOGS = "Logs"
COMPATIBILITY = "Compatibility"
GROUPS = (SHAPE, RENDEZVOUS, ELASTICITY, WORKERS, LOGS, COMPATIBILITY)


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
