"""What a flag is. `flags` is the table of them."""

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
    """One flag. Every name is also understood with underscores for its inner dashes."""

    name: str
    group: str
    help: str
    #: What stands for the value in the help; empty for a switch, which takes none.
    metavar: str = ""
    convert: Callable[[str], Any] = parse_truth
    #: The value of a flag that is written without one; empty: it needs one. The next word is its
    #: value only where that looks like one: it may as well be the script.
    alone: str = ""
    looks: re.Pattern[str] = re.compile("")
    #: As text, read by `convert` like any other value.
    default: str = "0"
    #: The default in words, where its text would say nothing.
    default_words: str = ""
    short: str = ""
    #: Whether torchrun has it: its abbreviations then go before those of the others.
    torchrun: bool = False
    #: Whether `PET_<NAME>` gives a default.
    pet: bool = True
    #: A variable read when neither the flag nor its PET_ variable is there.
    also_read: str = ""
    #: Given again, it adds to what was given before.
    repeated: bool = False
    #: Understood for the sake of old command lines; it does nothing here.
    ignored: bool = False

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that set it, the stronger first."""
        own = (f"PET_{self.dest.upper()}",) if self.pet else ()
        return (*own, self.also_read) if self.also_read else own


#: Belongs to every command, to no group.
HELP = Flag(
    name="--help", short="-h", group="", pet=False, torchrun=True, help="Show this text and exit."
)
