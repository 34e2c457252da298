"""Steps with bad numbers, as `torchelastic.Guard` finds them in whole jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.process.jobs import HERE, Job, job
from torchelastic.cli import main
from torchelastic.data import checker
from torchelastic.data.verdict import check
from torchelastic.errors import EXIT_OK, EXIT_USAGE

SCRIPT = HERE / "bad_steps.py"
PATIENCE = 120.0

pytestmark = pytest.mark.timeout(400)


def run(
    path, workers: int = 3, flags: str = "", code: int = 0, **keys
) -> tuple[dict[int, str], Job]:
    """The hashes of all workers in the end, by rank: each has buffers of its own."""
    with job(path, f"--nnodes=1 --max-restarts=20 {flags}", SCRIPT) as made:
        started = made.start(f"--nproc-per-node={workers}", ledger=path / "ledger", **keys)
        assert started.wait(PATIENCE) == code, made.said()
    ended = made.lines(event="done")
    assert len({line["weights"] for line in ended}) <= 1
    return {line["rank"]: line["digest"] for line in ended}, made


def assert_every_sample_is_used_once_or_skipped(made: Job, steps: int = 12) -> None:
    found = checker.read([made.directory / "ledger"])
    verdict = check(found.lines, lost=found.lost)
    assert verdict.ok, str(verdict)
    assert verdict.steps == steps


def skipped(made: Job) -> list[tuple[int, int]]:
    return [(one["step"], one["rank"]) for one in made.nodes[0].events("step-skipped")]


@pytest.mark.parametrize(
    ("keys", "bad", "known"),
    [
        ({}, "1:5:nan", "5"),
        ({"loss": 0}, "2:0:inf 0:8:nan", "0 8"),
        ({"model": "gan"}, "1:4:nan:0 0:9:nan:1", "4 9"),
        ({"model": "fixed"}, "1:5:nan", "5"),
        ({"model": "local"}, "2:7:nan", "7"),
        ({"on_bad": "retry"}, "2:7:nan 1:3:nan:0:once", "7"),
        ({"on_bad": "function", "check": 4}, "2:5:nan", "5"),
    ],
)
def test_bad_step_leaves_the_state_as_if_its_samples_had_been_known(tmp_path, keys, bad, known):
    """Starts two jobs: about 10 s."""
    given, _ = run(tmp_path / "known", known=known, **keys)
    assert len(given) == 3
    found, made = run(tmp_path / "bad", flags="--max-restarts=0", bad=bad, **keys)
    assert found == given, made.said()
    assert_every_sample_is_used_once_or_skipped(made)
    told = {(int(rank), int(step)) for rank, step, *_ in (one.split(":") for one in bad.split())}
    origins = made.nodes[0].events("step-skipped")
    assert {(one["rank"], one["step"] - 1) for one in origins if one["is_origin"]} == told
    if keys.get("model") == "fixed":
        assert [one["micro_batches"] for one in origins if one["is_origin"]] == [[3]]
    steps = {step - 1 for step, _ in skipped(made)}
    assert steps >= set(map(int, known.split())), made.said()


def test_worker_killed_in_the_step_after_a_bad_one_continues_from_its_private_state(
    tmp_path, monkeypatch
):
    """The first worker is killed before it knows that the step is bad, the second one in the next
    step. Starts two jobs: about 10 s."""
    flags = "--max-restarts=0 --world-sizes=3"
    given, _ = run(tmp_path / "known", flags=flags, known="5 8", pace=0.05)
    kills = [
        "kill@rank=1,step=5,place=optimizer.before,generation=0",
        "kill@rank=2,step=6,place=collective.before,n=2",
        "kill@rank=0,step=9,place=step.begin",
    ]
    monkeypatch.setenv("TORCHELASTIC_FAULTS", ";".join(kills))
    flags = "--max-restarts=20 --world-sizes=3"
    found, made = run(tmp_path / "bad", flags=flags, bad="1:5:nan 0:8:nan", pace=0.05)
    assert len(made.nodes[0].events("worker-exited")) >= 3
    assert found == given, made.said()
    assert_every_sample_is_used_once_or_skipped(made)


@pytest.mark.parametrize("keys", [{"on_bad": "stop"}, {"limit": 2}])
def test_stop_leaves_a_checkpoint_of_the_good_state(tmp_path, monkeypatch, keys):
    """With a limit, a worker that joins between two bad steps counts the first. Starts three jobs:
    about 15 s."""
    known = "3" if "limit" in keys else ""
    given, _ = run(tmp_path / "known", known=known, steps=6)
    bad = f"{'1:3:nan ' if known else ''}0:6:nan"
    store = tmp_path / "store"
    if known:
        kill = "kill@rank=1,step=5,place=step.begin,generation=0"
        monkeypatch.setenv("TORCHELASTIC_FAULTS", kill)
    flags = "--world-sizes=3"
    _, made = run(tmp_path / "bad", 3, flags, EXIT_USAGE, bad=bad, store=store, **keys)
    monkeypatch.delenv("TORCHELASTIC_FAULTS", raising=False)
    assert len(made.nodes[0].events("world-formed")) == 1 + bool(known)
    assert "Training ends: step 7 is bad: the gradient is not finite" in made.said()
    assert "Step 6 is in the checkpoint." in made.said()
    assert "a restart cannot help" in made.said()
    again, made = run(tmp_path / "again", known=known, steps=6, store=store)
    assert again[0] == given[0], made.said()


@pytest.mark.parametrize("keys", [{}, {"model": "gan"}, {"model": "fixed"}])
def test_commit_of_a_bad_step_keeps_the_state_of_the_one_before(tmp_path, monkeypatch, keys):
    """A worker of a script is killed in the step after the bad one. Starts two jobs: about 15 s."""
    given, _ = run(tmp_path / "known", mode="keep", known="5", **keys)
    monkeypatch.setenv(
        "TORCHELASTIC_FAULTS", "kill@rank=1,step=6,place=optimizer.before,generation=0"
    )
    found, made = run(tmp_path / "bad", mode="keep", bad="1:5:nan", **keys)
    assert found == given, made.said()
    assert {step for step, _ in skipped(made)} == {6}
    assert_every_sample_is_used_once_or_skipped(made)


def test_stop_in_a_script_leaves_a_checkpoint_of_the_good_state(tmp_path):
    """Starts two jobs: about 10 s."""
    keys = {"mode": "keep", "store": tmp_path / "store", "on_bad": "stop"}
    _, made = run(tmp_path / "bad", flags="--max-restarts=0", code=1, bad="0:6:nan", **keys)
    assert "Training ends: step 7 is bad: the gradient is not finite" in made.said()
    again, made = run(tmp_path / "again", **keys)
    assert len(again) == 3
    assert {line["step"] for line in made.lines(event="restored")} == {6}


PAGE = Path(__file__).parents[2] / "docs/guides/bad-numbers.md"


def test_page_of_bad_numbers_leaves_out_the_sample_it_makes_bad(tmp_path, capsys, monkeypatch):
    """Its zygote imports torch."""
    program, reading = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    script = tmp_path / "train.py"
    script.write_text(program)
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2") as made:
        node = made.start(script=[str(script)])
        assert node.wait(PATIENCE) == 0, made.said()
    assert node.stderr.count("step 70 is skipped: the gradient is not finite") == 1
    assert main(["skipped", str(node.directory / "logs")]) == EXIT_OK
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skipped.jsonl").write_text(capsys.readouterr().out)
    assert (tmp_path / "skipped.jsonl").read_text().count("\n") == 20
    names = {"dataset": range(2000), "torch": torch}
    exec(reading, names)
    assert len(names["dataset"]) == 1990
    assert 421 not in names["dataset"].indices
