"""The `Command` record. `command_table` has all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchelastic.cli.options.flag import HELP, Flag
from torchelastic.cli.options.flags import FLAGS


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of a command, and its help."""

    #: As users write it: `torchelastic status`.
    prog: str
    about: str
    #: Besides those of a launch, if it `launches`.
    own_flags: tuple[Flag, ...] = ()
    #: Takes the flags of `run`, their PET_ variables, and a script with its arguments.
    launches: bool = False
    #: For a command that launches: refused without a script.
    needs_script: bool = True
    #: Placeholders for the words that a command takes if it does not launch, in brackets if they
    #: are optional; empty: none.
    argument: str = ""
    argument_help: str = ""
    #: Defaults of flags that differ from those of `torchelastic run`.
    defaults: Mapping[str, str] = field(default_factory=dict)
    #: The last paragraphs of the help.
    epilog: str = ""

    @property
    def flags(self) -> tuple[Flag, ...]:
        launch = FLAGS if self.launches else ()
        return (*launch, *self.own_flags, HELP)

    @property
    def usage(self) -> str:
        words = self.argument
        if self.launches:
            words = "SCRIPT [arguments]" if self.needs_script else "[SCRIPT [arguments]]"
        return f"{self.prog} [flags] {words}".rstrip()

    def default(self, flag: Flag) -> str:
        """Return the default of a flag, as text."""
        return self.defaults.get(flag.dest, flag.default)
