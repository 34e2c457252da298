"""The help of every command, generated from the same table as the reference pages."""

import shutil
import subprocess

import pytest

from torchelastic import cli
from torchelastic.cli.command_table import BY_NAME, DISTRIBUTED_LAUNCH, LAUNCHERS, RUN
from torchelastic.cli.completion import script
from torchelastic.cli.flags import FLAGS
from torchelastic.cli.help import help_text
from torchelastic.config.flag import GROUPS


@pytest.mark.parametrize("defaults", LAUNCHERS, ids=lambda defaults: defaults.prog)
def test_help_names_every_flag_and_fits(defaults):
    for width in (80, 100):
        text = help_text(defaults, width)
        assert all(f"\n{group}:\n" in text for group in GROUPS)
        assert all(flag.name in text for flag in FLAGS)
        prose, _, _ = text.partition("\nExamples:\n")
        assert max(map(len, prose.splitlines())) <= width
        assert "\0" not in text


@pytest.mark.parametrize("command", BY_NAME.values(), ids=BY_NAME)
def test_help_of_a_command_names_its_own_flags_and_fits(command):
    for width in (80, 100):
        text = help_text(command, width)
        assert all(f"{flag.name} " in text for flag in command.own_flags)
        assert not command.argument or f"\n  {command.argument.strip('[]')} " in text
        prose, _, _ = text.partition("\nExamples:\n")
        assert max(map(len, prose.splitlines())) <= width
        assert text.endswith("\n")
        assert not text.endswith("\n\n")


def test_help_shows_the_commands_own_defaults():
    assert "(default: 100)" in help_text(RUN)
    launch = help_text(DISTRIBUTED_LAUNCH)
    assert "(default: auto)" in launch
    assert "(default: 100)" not in launch


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
