"""Parse argv and the environment into typed values, for every command.

Why not argparse: docs/decisions/0026-command-line.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.cli.command_table import Command
from torchelastic.config.flag import Flag, convert
from torchelastic.errors import ConfigError

#: Where a value comes from; the larger wins.
DEFAULT, PLATFORM, VARIABLE, ARGUMENT = range(4)


@dataclass(frozen=True)
class Parsed:
    """The values of all flags by their `dest`, and the words that are no flags."""

    prog: str
    values: Mapping[str, Any]
    #: DEFAULT, PLATFORM, VARIABLE or ARGUMENT.
    strength: Mapping[str, int]
    #: The script and its arguments, or the arguments of a command that does not launch.
    command: tuple[str, ...]
    #: The flags of a launch that were given, in full, for `torchelastic run` on another machine.
    words: tuple[str, ...] = ()

    def __getitem__(self, dest: str) -> Any:
        return self.values[dest]

    def given(self, dest: str) -> bool:
        """Return True if it was set: by a flag, a variable, or the platform (`from_platform`)."""
        return self.strength[dest] > DEFAULT

    @property
    def argument(self) -> str | None:
        """The first word that is not a flag."""
        return self.command[0] if self.command else None


def parse(argv: Sequence[str], command: Command, environ: Mapping[str, str]) -> Parsed:
    """Parse a command line. A flag wins over its variable, a variable over the default."""
    known = command.flags
    values = {flag.dest: flag.convert(command.default(flag)) for flag in known}
    strength = dict.fromkeys(values, DEFAULT)
    for flag, variable in set_variables(known, environ):
        values[flag.dest] = convert(flag, variable, environ[variable])
        strength[flag.dest] = VARIABLE
    words: deque[str] = deque(argv)
    others: list[str] = []
    passed: list[str] = []
    while True:
        for flag, spelling, text in _read_flags(words, known):
            value = convert(flag, spelling, text)
            if flag.repeated and strength[flag.dest] == ARGUMENT:
                value = values[flag.dest] + value
            values[flag.dest] = value
            strength[flag.dest] = ARGUMENT
            if flag.group:
                passed.append(flag.name if flag.is_switch else f"{flag.name}={text}")
        if command.launches or not words or words[0] == "--":
            break
        others.append(words.popleft())  # flags may follow it
    others += list(words)[1:]  # after `--`
    rest = _script(words) if command.launches else _argument(others, command)
    return Parsed(command.prog, values, strength, rest, tuple(passed))


def set_variables(flags: Sequence[Flag], environ: Mapping[str, str]) -> Iterator[tuple[Flag, str]]:
    """Yield each flag with the strongest of its variables; an empty variable counts as unset."""
    for flag in flags:
        variable = next((name for name in flag.variables if environ.get(name)), None)
        if variable is not None:
            yield flag, variable


def _read_flags(words: deque[str], known: Sequence[Flag]) -> Iterator[tuple[Flag, str, str]]:
    """Pop flags off `words` up to the first word that is not one; yield flag, spelling, value."""
    while words and words[0].startswith("-") and words[0] != "-":
        if words[0] == "--":
            return
        word = words.popleft()
        if word.startswith("--"):
            spelling, equals, value = word.partition("=")
            flag = _find(spelling, known)
            yield flag, flag.name, _value(flag, spelling, value if equals else None, words)
        else:
            yield from _read_short(word, words, known)


def _script(words: Sequence[str]) -> tuple[str, ...]:
    """Return the script and its arguments, without a `--` before or right after the script.

    argparse drops both, so scripts do not see it under torchrun either.
    """
    command = list(words)
    for place in (0, 1):
        if command[place : place + 1] == ["--"]:
            del command[place]
            break
    return tuple(command)


def _argument(words: Sequence[str], command: Command) -> tuple[str, ...]:
    """Return the arguments of a command that launches nothing."""
    most = len(command.argument.split())
    if len(words) > most:
        takes = f"takes only {command.argument.strip('[]')}" if most else "takes only flags"
        raise ConfigError(f"Unexpected argument '{words[most]}': the command {takes}.")
    return tuple(words)


def _read_short(
    word: str, words: deque[str], known: Sequence[Flag]
) -> Iterator[tuple[Flag, str, str]]:
    """Read `-m`, `-r 3`, `-r3`, `-r=3`, or several flags in one word, such as `-mr3`."""
    letters = word[1:]
    while letters:
        short, letters = f"-{letters[0]}", letters[1:]
        flag = next((flag for flag in known if flag.short == short), None)
        if flag is None:
            raise ConfigError(_unknown(word, known))
        attached = None
        if letters and (not flag.is_switch or letters.startswith("=")):
            attached, letters = letters.removeprefix("="), ""
        yield flag, short, _value(flag, short, attached, words)


def _value(flag: Flag, spelling: str, attached: str | None, words: deque[str]) -> str:
    """Return the flag's value: attached to it, or the next word."""
    if flag.is_switch:
        if attached is not None:
            raise ConfigError(f"{spelling} takes no value: remove the value.")
        return "1"
    if attached is not None:
        return attached
    if flag.alone and not (words and flag.looks.fullmatch(words[0])):
        return flag.alone
    if not words or _looks_like_flag(words[0]):
        raise ConfigError(f"{spelling} needs a value: write {spelling}={flag.metavar}.")
    return words.popleft()


def _looks_like_flag(word: str) -> bool:
    """Return False for `-1`: the flag's own check reports a negative number better."""
    return word.startswith("-") and word != "-" and not word[1:].replace(".", "", 1).isdigit()


def _find(spelling: str, known: Sequence[Flag]) -> Flag:
    """Find a flag by its long name: with dashes or underscores, in full or abbreviated.

    torchrun's flags win, so that flags torchrun does not have never make an abbreviation that
    works with torchrun ambiguous.
    """
    name = spelling.replace("_", "-")
    candidates = [flag for flag in known if flag.name.startswith(name)]
    exact = next((flag for flag in candidates if flag.name == name), None)
    if exact is not None:
        return exact
    candidates = [flag for flag in candidates if flag.torchrun] or candidates
    if not candidates:
        raise ConfigError(_unknown(spelling, known))
    if len(candidates) > 1:
        names = ", ".join(flag.name for flag in candidates)
        raise ConfigError(f"{spelling} is ambiguous: it matches {names}. Use the full name.")
    return candidates[0]


def _unknown(spelling: str, known: Sequence[Flag]) -> str:
    # Imported here: only needed for an error.
    import difflib

    name = spelling.replace("_", "-")
    # Also compare prefixes: `--nprocs` is closer to `--nproc-` than to `--nnodes`.
    meant = {flag.name[: len(name)]: flag.name for flag in known}
    meant |= {flag.name: flag.name for flag in known}
    near = difflib.get_close_matches(name, meant, n=1)
    hint = f"did you mean {meant[near[0]]}?" if near else "--help lists all flags."
    return f"Unknown flag {spelling}: {hint}"
