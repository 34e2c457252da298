"""`doctor`: from a command line to the subject, and from findings to text. Runs no check."""

import pytest

from torchelastic import cli
from torchelastic.cli.command_table import DOCTOR, RUN
from torchelastic.cli.commands import doctor
from torchelastic.cli.commands.doctor import lines, title
from torchelastic.cli.parser import parse
from torchelastic.config import Entry, LaunchConfig
from torchelastic.doctor.checkup import Subject
from torchelastic.doctor.finding import fault, not_checked, ok, warning
from torchelastic.errors import ConfigError


def launch_of(*argv, environ=None):
    environ = environ or {}
    return doctor.launch_of(parse(argv, DOCTOR, environ), environ)


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def test_the_launch_is_the_one_that_run_would_make():
    subject = launch_of("-j", "2:4x8", "--rdzv-endpoint", "node1", "--lease", "5", "train.py", "-x")
    config = subject.config
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 4, 8)
    assert (config.rdzv_endpoint, config.lease) == ("node1:29400", 5.0)
    assert subject.entry == Entry("script", "train.py", ("-x",))
    assert (subject.refusals, subject.alone) == ([], False)
    assert all(launch_of(*argv).alone for argv in ((), ("--gpu",), ("--json",)))


def test_doctor_flag_after_the_script_belongs_to_the_script():
    parsed = parse(["--gpu", "--json", "train.py", "--gpu"], DOCTOR, {})
    assert (parsed["gpu"], parsed["json"], parsed.command) == (True, True, ("train.py", "--gpu"))
    parsed = parse(["train.py", "--json"], DOCTOR, {})
    assert not parsed["json"]
    with pytest.raises(ConfigError, match="Unknown flag --gpu"):
        parse(["--gpu", "train.py"], RUN, {})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["missing.py"], "Script 'missing.py' not found"),
        (["--nproc-per-node", "xpu", "train.py"], "this machine has no XPU"),
        (["--nnodes", "2", "train.py"], "needs --rdzv-endpoint"),
        (
            ["--preload", "nothing_of_that_name", "train.py"],
            "module 'nothing_of_that_name' not found",
        ),
        (["--log-dir", "train.py/logs", "train.py"], "--log-dir train.py/logs cannot be created"),
    ],
)
def test_errors_of_run_are_findings_with_the_same_text(argv, words):
    (refusal,) = launch_of(*argv).refusals
    assert words in refusal
    assert cli.main(["run", *argv]) == 64


def test_all_errors_of_run_are_reported_at_once(capsys):
    assert len(launch_of("--nnodes", "2", "--preload", "nothing_here", "missing.py").refusals) == 3
    assert cli.main(["doctor", "--nnodes", "3:1"]) == 64
    assert capsys.readouterr().err.startswith("torchelastic doctor: error: --nnodes '3:1'")


def test_no_log_directory_is_left_behind(tmp_path):
    (tmp_path / "kept").mkdir()
    for path in ("kept", "kept/made/by/us", "made"):
        assert launch_of("--log-dir", path, "train.py").refusals == []
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["kept", "train.py"]


def test_variables_that_set_flags_and_those_the_command_line_contradicts():
    environ = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "node1", "PET_LEASE": "5"}
    subject = launch_of("--nnodes", "3", "--lease", "5", "train.py", environ=environ)
    assert subject.used == ["PET_RDZV_ENDPOINT"]
    assert subject.overridden == ["PET_NNODES"]
    assert set(environ) <= set(subject.known)


# --- text ----------------------------------------------------------------------------------------


def test_findings_are_aligned_wrapped_and_say_what_to_do():
    long = "word " * 30
    text = lines(
        [
            ok("kernel", "It is good."),
            warning("shared memory", long, "Do this."),
            fault("gloo", "It is not."),
            not_checked("rendezvous", "Nobody is there."),
        ],
        80,
    )
    assert text[0] == "  ok           kernel           It is good."
    assert all(len(line) <= 80 for line in text)
    column = text[0].index("It")
    assert all(line[column - 1] == " " and line[column] != " " for line in text)
    assert " " * column + "-> Do this." in text


def test_user_text_cannot_move_the_cursor_or_begin_a_line():
    (line,) = lines([fault("script", "a\x1b[2Jb\nc")], 80)
    assert line.endswith("a\\x1b[2Jb c")
    subject = Subject(LaunchConfig(), Entry("script", "a\x1b]0;x\ntrain.py"), {})
    assert "\x1b" not in title(subject)
    assert "\n" not in title(subject)


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        (Subject(LaunchConfig(), None, {}, alone=True), "Checking this machine. Add a script"),
        (
            Subject(LaunchConfig(), None, {}, alone=True, refusals=["No."]),
            "the launch is not valid",
        ),
        (Subject(LaunchConfig(), None, {}), "Checking a launch on 1 node with --nproc-per-node 1."),
        (
            Subject(LaunchConfig(1, 2, 4, rdzv_endpoint="a:1"), Entry("script", "t.py"), {}),
            "t.py on 1 to 2 nodes with --nproc-per-node 4, rendezvous at a:1.",
        ),
    ],
)
def test_the_first_line_names_the_subject(subject, words):
    assert words in title(subject)
