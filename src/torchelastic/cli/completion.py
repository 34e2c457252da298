"""`--print-completion`: shell completion scripts for all commands and their flags."""

from __future__ import annotations

from torchelastic.cli.command_table import BY_NAME, Command

_BASH = """\
_torchelastic() {
  local word=${COMP_WORDS[COMP_CWORD]} choices=
  if [[ $COMP_CWORD -eq 1 ]]; then
    choices="@FIRST@"
  elif [[ $word == -* ]]; then
    case "${COMP_WORDS[*]:1:2} " in
@FLAGS@
    esac
  elif [[ $COMP_CWORD -eq 2 ]]; then
    case "${COMP_WORDS[1]}" in
@SECOND@
    esac
  fi
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
}
complete -o bashdefault -o default -F _torchelastic torchelastic
"""
_ZSH = """\
#compdef torchelastic
_torchelastic() {
  local choices=
  if (( CURRENT == 2 )); then
    choices="@FIRST@"
  elif [[ $PREFIX == -* ]]; then
    case "$words[2] $words[3] " in
@FLAGS@
    esac
  elif (( CURRENT == 3 )); then
    case "$words[2]" in
@SECOND@
    esac
  fi
  if [[ -n $choices ]]; then compadd -- ${=choices}; else _files; fi
}
if [[ $funcstack[1] == _torchelastic ]]; then
  _torchelastic "$@"
else
  compdef _torchelastic torchelastic
fi
"""
#: tcsh offers the flags of all commands: its rules do not depend on an earlier word.
_TCSH = "complete torchelastic 'p/1/(@FIRST@)/' @AFTER@ 'c/--/(@BARE@)/' 'p/*/f/'\n"
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "tcsh": _TCSH}


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    seconds: dict[str, list[str]] = {}
    for name in BY_NAME:
        first, _, second = name.partition(" ")
        seconds.setdefault(first, []).extend([second] if second else [])
    groups = {first: " ".join(names) for first, names in seconds.items() if names}
    flags = {name: " ".join(_flag_names(command)) for name, command in BY_NAME.items()}
    every = dict.fromkeys(name for names in flags.values() for name in names.split())
    filled = {
        "FIRST": " ".join(seconds),
        "FLAGS": "\n".join(
            f'      "{name} "*) choices="{names}" ;;' for name, names in flags.items()
        ),
        "SECOND": "\n".join(
            f'      {first}) choices="{names}" ;;' for first, names in groups.items()
        ),
        "AFTER": " ".join(f"'n/{first}/({names})/'" for first, names in groups.items()),
        "BARE": " ".join(name.removeprefix("--") for name in every),
    }
    text = _SCRIPTS[shell]
    for name, value in filled.items():
        text = text.replace(f"@{name}@", value)
    return text


def _flag_names(command: Command) -> list[str]:
    return [flag.name for flag in command.flags if not flag.ignored]
