"""`torchelastic submit runai`: what is printed, run and refused."""

import pytest

from torchelastic import cli


def submit(capsys, line):
    code = cli.main(["submit", "runai", *line.split()])
    return code, capsys.readouterr()


def test_a_dry_run_prints_the_command(capsys):
    line = "--image img --nnodes 2:4 --job-dir /shared --dry-run -- /app/train_lm.py --lr 1"
    code, said = submit(capsys, line)
    assert (code, said.err) == (0, "")
    assert said.out == (
        "runai training pytorch submit train-lm --image img --no-master --workers 4 "
        "--min-replicas 2 --max-replicas 4 -e TORCHELASTIC_JOB_DIR=/shared/train-lm "
        "--command -- torchelastic run --nnodes=2:4 -- /app/train_lm.py --lr 1\n"
    )


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ("--nnodes 2", True),
        ("--nnodes 1", False),
        ("--nnodes 2 --job-dir /shared", False),
        ("--nnodes 2 --rdzv-secret-file /run/job/secret", False),
    ],
)
def test_a_job_without_a_secret_is_reported(capsys, flags, warns):
    _, said = submit(capsys, f"--image img --dry-run {flags} train.py")
    assert ("The job has no secret" in said.err) == warns


@pytest.mark.parametrize("code", [0, 3])
def test_the_program_is_run_and_its_exit_code_returned(tmp_path, monkeypatch, capfd, code):
    runai = tmp_path / "runai"
    runai.write_text(f'#!/bin/sh\necho "$3 $4"\nexit {code}\n')
    runai.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cli.main(["submit", "runai", "--image", "img", "train.py"]) == code
    assert capfd.readouterr().out == "submit train\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train.py", "No --image given: name one"),
        ("--image img", "No script given"),
        ("--image img train.py", "runai not found: install Run:ai's command line"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, line, sentence):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = submit(capsys, line)
    assert (code, said.out) == (64, "")
    assert f"torchelastic submit runai: error: {sentence}" in said.err
