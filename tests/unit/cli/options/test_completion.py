"""The scripts of `--print-completion`, run by the real shells."""

import shutil
import subprocess

import pytest

from torchelastic import cli
from torchelastic.cli.options.command_table import BY_NAME
from torchelastic.cli.options.completion import script

CASES = [
    ("torchelastic r", "run rendezvous"),
    ("torchelastic run --log-line", "--log-line-prefix-template"),
    ("torchelastic run --log-dir logs --stand", "--standalone"),
    ("torchelastic doctor --print-c", "--print-completion"),
    ("torchelastic doctor --g", "--grow --gpu"),
    ("torchelastic status --j", "--job --json"),
    ("torchelastic logs job --l", "--lines"),
    ("torchelastic status --log-line", ""),
    ("torchelastic rendezvous s", "serve"),
    ("torchelastic rendezvous serve --state", "--state-file"),
    ("torchelastic run train.p", ""),
]


def test_bash_completes_commands_and_flags():
    asked = "complete -p torchelastic\n" + "".join(
        f"COMP_WORDS=({line}); COMP_CWORD={line.count(' ')}; _torchelastic\n"
        "echo ${COMPREPLY[@]}\n"
        for line, _ in CASES
    )
    said = subprocess.run(
        ["bash", "-c", script("bash") + asked], capture_output=True, text=True, timeout=60
    )
    registered, *found = said.stdout.splitlines()
    assert registered == "complete -o bashdefault -o default -F _torchelastic torchelastic"
    assert (found, said.stderr) == ([expected for _, expected in CASES], "")


def test_bash_knows_every_flag_of_every_command():
    text = script("bash")
    for name, command in BY_NAME.items():
        (line,) = (line for line in text.splitlines() if line.strip().startswith(f'"{name} "'))
        missing = [
            f.name
            for f in command.flags
            if not f.ignored and f" {f.name}" not in line.replace('"', " ")
        ]
        assert missing == [], name


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_the_other_shells_take_their_script(shell):
    assert "@" not in script(shell).replace('"$@"', "")
    if shutil.which(shell):
        said = subprocess.run([shell, "-n"], input=script(shell), capture_output=True, text=True)
        assert (said.returncode, said.stderr) == (0, "")


def test_the_flag_prints_the_script_and_needs_no_job(capsys):
    for argv in (["run", "--print-completion", "zsh"], ["--print-completion=zsh"]):
        assert cli.main(argv) == 0
        assert capsys.readouterr().out == script("zsh")
    assert cli.main(["run", "--print-completion", "fish"]) == 64
    assert "'fish' is not a valid choice: write bash, zsh or tcsh." in capsys.readouterr().err
