"""Parse argv and the environment into typed values, using the table in `flags`.

Why not argparse: before Python 3.12.3 it treats `--nproc` as ambiguous between `--nproc-per-node`
and the same flag with underscores, and it cannot tell a default from a value that was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.cli.options.command_defaults import CommandDefaults
from torchelastic.cli.options.flag import HELP, Flag
from torchelastic.cli.options.flags import FLAGS
from torchelastic.errors import ConfigError

_COMMON = (*FLAGS, HELP)
_BY_SHORT = {flag.short: flag for flag in _COMMON if flag.short}

#: Where a value comes from; the larger wins.
DEFAULT, VARIABLE, ARGUMENT = range(3)


@dataclass(frozen=True)
class Parsed:
    """The values of all flags by their `dest`, and the command to run."""

    values: Mapping[str, Any]
    #: DEFAULT, VARIABLE or ARGUMENT.
    strength: Mapping[str, int]
    #: The script and its arguments.
    command: tuple[str, ...]

    def __getitem__(self, dest: str) -> Any:
        return self.values[dest]

    def given(self, dest: str) -> bool:
        """Return True if the user set it, by a flag or a variable."""
        return self.strength[dest] > DEFAULT


def parse(argv: Sequence[str], defaults: CommandDefaults, environ: Mapping[str, str]) -> Parsed:
    """Parse a command line. A flag wins over its variable, a variable over the default."""
    words = deque(argv)
    known = (*_COMMON, *defaults.own_flags)
    values = {flag.dest: flag.convert(defaults.default(flag)) for flag in known}
    strength = dict.fromkeys(values, DEFAULT)
    for flag, variable in set_variables(environ):
        values[flag.dest] = _convert(flag, variable, environ[variable])
        strength[flag.dest] = VARIABLE
    for flag, spelling, text in _read_flags(words, known):
        value = _convert(flag, spelling, text)
        if flag.repeated and strength[flag.dest] == ARGUMENT:
            value = values[flag.dest] + value
        values[flag.dest] = value
        strength[flag.dest] = ARGUMENT
    return Parsed(values, strength, _command(words))


def set_variables(environ: Mapping[str, str]) -> Iterator[tuple[Flag, str]]:
    """Yield each flag with the strongest of its variables; an empty variable counts as unset."""
    for flag in _COMMON:
        variable = next((name for name in flag.variables if environ.get(name)), None)
        if variable is not None:
            yield flag, variable


def _convert(flag: Flag, source: str, text: str) -> Any:
    try:
        return flag.convert(text)
    except ConfigError as error:
        raise ConfigError(f"{source} {error}") from None


def _read_flags(words: deque[str], known: Sequence[Flag]) -> Iterator[tuple[Flag, str, str]]:
    """Pop flags off `words` until the first word that is no flag; yield flag, spelling, value."""
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


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the script and its arguments, without a `--` before or right after the script.

    argparse drops both, so scripts do not see it under torchrun either.
    """
    command = list(words)
    for place in (0, 1):
        if command[place : place + 1] == ["--"]:
            del command[place]
            break
    return tuple(command)


def _read_short(
    word: str, words: deque[str], known: Sequence[Flag]
) -> Iterator[tuple[Flag, str, str]]:
    """Read `-m`, `-r 3`, `-r3`, `-r=3`, or several flags in one word, such as `-mr3`."""
    letters = word[1:]
    while letters:
        short, letters = f"-{letters[0]}", letters[1:]
        flag = _BY_SHORT.get(short)
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
