"""`torchelastic submit`: what is printed, written and refused."""

import pytest

from torchelastic import cli


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def submit(capsys, line):
    code = cli.main(["submit", "slurm", *line.split()])
    return code, capsys.readouterr()


def test_a_dry_run_prints_the_script_and_makes_nothing(train, capsys):
    line = "--nnodes 2:4 --nproc-per-node 8 --sbatch-option=--qos=high --dry-run -- train.py --lr 1"
    code, said = submit(capsys, line)
    assert code == 0
    assert "#SBATCH --nodes=2-4\n" in said.out
    assert "#SBATCH --qos=high\n" in said.out
    assert "torchelastic run --nnodes=2:4 --nproc-per-node=8 -- train.py --lr 1\n" in said.out
    assert [path.name for path in train.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("flags", "decides"),
    [
        ("--nnodes 2", True),
        ("--nnodes 1", False),
        ("--nnodes 2 --witness /w", False),
        ("--nnodes 2 --quorum none", False),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e", False),
    ],
)
def test_the_jobs_directory_decides_between_halves_unless_something_else_does(
    train, capsys, flags, decides
):
    _, said = submit(capsys, f"{flags} --dry-run train.py")
    assert ("PET_WITNESS" in said.out) == decides


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nnodes 2", "No script given"),
        ("gone.py", "Script 'gone.py' not found"),
        ("--sbatch-option qos=x train.py", "--sbatch-option 'qos=x' is not an option of sbatch"),
    ],
)
def test_what_is_refused(train, capsys, line, sentence):
    code, said = submit(capsys, line)
    assert (code, said.out) == (64, "")
    assert f"torchelastic submit slurm: error: {sentence}" in said.err


def test_without_slurm_it_says_so(train, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, said = submit(capsys, "--job-dir job train.py")
    assert code == 64
    assert "sbatch not found: run this where Slurm is installed" in said.err
    assert not (train / "job").exists(), "the same command is refused the next time"


def test_a_job_that_slurm_refuses_leaves_nothing(train, capsys, monkeypatch):
    sbatch = train / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{train}:/bin:/usr/bin")
    code, said = submit(capsys, "--job-dir job train.py")
    assert code == 64
    assert "sbatch refused the job: invalid partition." in said.err
    assert not (train / "job").exists()
