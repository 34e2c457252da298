"""The scripts of `--print-completion`, run by the real shells."""

import shutil
import subprocess

import pytest

from torchelastic import cli
from torchelastic.cli.options.completion import script

CASES = [
    ("torchelastic r", "run rendezvous"),
    ("torchelastic run --log-line", "--log-line-prefix-template"),
    ("torchelastic doctor --print-c", "--print-completion"),
    ("torchelastic status --log-line", ""),
    ("torchelastic run train.p", ""),
]


def test_bash_completes_commands_and_flags():
    asked = "".join(
        f"COMP_WORDS=({line}); COMP_CWORD={line.count(' ')}; _torchelastic\n"
        "echo ${COMPREPLY[@]}\n"
        for line, _ in CASES
    )
    said = subprocess.run(
        ["bash", "-c", script("bash") + asked], capture_output=True, text=True, timeout=60
    )
    assert (said.stdout.splitlines(), said.stderr) == ([found for _, found in CASES], "")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_the_other_shells_take_their_script(shell):
    assert "@" not in script(shell).replace('"$@"', "")
    if shutil.which(shell):
        said = subprocess.run([shell, "-n"], input=script(shell), capture_output=True, text=True)
        assert (said.returncode, said.stderr) == (0, "")


def test_the_flag_prints_the_script_and_needs_no_job(capsys):
    assert cli.main(["run", "--print-completion", "zsh"]) == 0
    assert capsys.readouterr().out == script("zsh")
    assert cli.main(["run", "--print-completion", "fish"]) == 2
    assert "'fish' is not a valid choice: write bash, zsh or tcsh." in capsys.readouterr().err
