"""`--print-completion`: shell completion scripts for the commands and flags."""

from __future__ import annotations

from torchelastic.cli import _COMMANDS
from torchelastic.cli.options.flag import HELP
from torchelastic.cli.options.flags import FLAGS

#: The commands that take the flags of a job.
_TAKE_FLAGS = "run|doctor"

_BASH = """\
_torchelastic() {
  local word=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
  elif [[ $word == -* && ${COMP_WORDS[1]} =~ ^(@TAKE_FLAGS@)$ ]]; then
    COMPREPLY=($(compgen -W "@FLAGS@" -- "$word"))
  fi
}
complete -o bashdefault -o default -F _torchelastic torchelastic
"""
_ZSH = """\
#compdef torchelastic
_torchelastic() {
  if (( CURRENT == 2 )); then
    compadd -- @COMMANDS@
  elif [[ $PREFIX == -* && $words[2] == (@TAKE_FLAGS@) ]]; then
    compadd -- @FLAGS@
  else
    _files
  fi
}
if [[ $funcstack[1] == _torchelastic ]]; then
  _torchelastic "$@"
else
  compdef _torchelastic torchelastic
fi
"""
_TCSH = "complete torchelastic 'p/1/(@COMMANDS@)/' 'c/--/(@BARE@)/' 'p/*/f/'\n"
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "tcsh": _TCSH}


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    names = [flag.name for flag in (*FLAGS, HELP) if not flag.ignored]
    values = {
        "COMMANDS": " ".join(_COMMANDS),
        "TAKE_FLAGS": _TAKE_FLAGS,
        "FLAGS": " ".join(names),
        "BARE": " ".join(name.removeprefix("--") for name in names),
    }
    text = _SCRIPTS[shell]
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
