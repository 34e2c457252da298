import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.unit.cli.cast import CAUSE, HOSTILE, Agent, achieved, harmless, trained
from torchelastic.cli import main
from torchelastic.errors import EXIT_OK, EXIT_USAGE
from torchelastic.events import job_registry
from torchelastic.events import types as events
from torchelastic.events.failure import Failure

pytestmark = pytest.mark.usefixtures("at_one_moment")


@pytest.fixture
def show(capsys):
    def run(*argv: str) -> str:
        assert main(["status", *argv]) == EXIT_OK
        text = capsys.readouterr().out
        for line in text.splitlines():
            whole = "--json" in argv or "events.jsonl" in line  # a path is to be copied whole
            assert whole or len(line) <= 100
        return text

    return run


def test_no_jobs(show):
    assert show().startswith("No job is running on this machine.\n")
    assert json.loads(show("--json")) == []


def test_a_live_job(show):
    agent = Agent("imagenet").tell(events.BecameLeader()).world(0, "node-a", "node-b")
    agent.world(1, "node-a", reason="node-b failed; a node failure uses no restart")
    agent.log.close()
    lines = show().splitlines()
    assert lines[0].startswith("imagenet  ")
    assert lines[0].endswith("  running for 0 s")
    assert lines[1] == "  generation 1: 2 workers on 1 node, 1 restart used"
    assert lines[2] == "  goodput unknown"
    assert lines[3] == (
        f"    node-a  running    leader, hosts the rendezvous, agent pid {os.getpid()}"
    )
    assert lines[4] == (
        "  just now: generation 1 began: node-b failed; a node failure uses no restart"
    )


def test_a_job_that_has_just_started(show):
    path = job_registry.directory_for("new", "id") / "events.jsonl"
    job_registry.register(
        "new", "id", pid=os.getpid(), name="node-a", endpoint="", command=[], events=path
    )
    assert show().endswith("starting for 0 s\n")
    assert "new" in show("new")


def test_two_agents_of_one_job_make_one_picture(show):
    one, other = Agent("job", "node-a"), Agent("job", "node-b")
    other.clock.advance(100)
    one.world(0, "node-a", "node-b")
    other.world(1, "node-a", "node-b", reason="later")
    text = show()
    assert text.count("job  ") == 1
    assert "generation 1: 4 workers on 2 nodes" in text
    assert "generation 1 began: later" in text


def test_recent_jobs_are_a_table(show):
    Agent("done").world(0, "node-a").end(0, "every worker succeeded")
    Agent("failed").world(0, "node-a").end(1, CAUSE.sentence(), CAUSE)
    Agent("killed", pid=2**22 + 1).world(3, "node-a").log.close()
    lines = show().splitlines()
    assert lines[:3] == ["No job is running on this machine.", "", "Recent:"]
    rows = {line.split()[0]: line for line in lines[3:]}
    assert rows["done"] == "  done    just now  exit 0  after 0 s  every worker succeeded"
    assert rows["killed"] == "  killed  just now  killed  after 0 s  in generation 3"
    assert rows["failed"].startswith("  failed  just now  exit 1  after 0 s  rank 9 on node-b")
    assert rows["failed"].endswith("…")


def test_a_job_whose_log_is_gone_is_not_said_to_have_been_killed(show):
    agent = Agent("done").world(0, "node-a")
    agent.end(0, "every worker succeeded")
    agent.log.path.unlink()
    assert show().splitlines()[-1] == "  done  just now  gone  after 0 s  its event log is gone"
    assert show("done").splitlines()[0].endswith("  gone just now")


def test_many_recoveries_are_counted(show):
    agent = Agent("job").world(0, "node-a")
    for generation in range(6):
        agent.tell(events.GenerationOver("failure", CAUSE.sentence()), generation)
        agent.world(generation + 1, "node-a")
        agent.tell(events.WorkersStarted([0], [1], 0.1), generation + 1)
    agent.tell(events.GenerationOver("failure", CAUSE.sentence()), 6)
    agent.end(1, CAUSE.sentence(), CAUSE)
    text = show("job")
    assert "\n  recoveries, the last 5 of 7\n" in text
    assert "generation 6, failure: the job ended\n" in text


def test_details_show_each_event_once(show):
    agent = Agent("imagenet").world(0, "node-a", "node-b")
    agent.tell(events.GenerationOver("failure", CAUSE.sentence()), 0)
    agent.world(1, "node-a", "node-b", reason=f"{CAUSE.sentence()}; 1 of 3 restarts used")
    agent.end(1, "the same failure came back", CAUSE)
    text = show("image")
    assert "command       train.py --lr 0.1\n" in text
    assert "rendezvous    node-a:29400\n" in text
    assert "nodes wanted  1 to 4\n" in text
    assert "generation 0 ended: rank 9 on node-b" in text
    assert "generation 1 began: 1 of 3 restarts used\n" in text
    assert "node-a ended with exit code 1: the same failure came back\n" in text
    assert "first failure\n    rank 9 on node-b (local rank 1, pid 4242) at step 7:" in text
    assert "    Traceback (most recent call last):\n    RuntimeError: boom" in text


def test_an_exact_job_id_goes_before_longer_ones_and_a_directory(show, tmp_path, monkeypatch):
    Agent("job").world(0, "node-a").log.close()
    Agent("job-2").log.close()
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "job-2" not in show("job")
    assert "running for " in show("job")
    assert "job-2" in show("jo")


def test_status_of_unknown_job_is_refused_in_a_sentence(capsys, tmp_path):
    def said(*argv):
        assert main(["status", *argv]) == EXIT_USAGE
        return capsys.readouterr().err

    assert said("nope") == (
        "torchelastic status: error: No job 'nope' on this machine: `torchelastic status` lists "
        "the known jobs.\n"
    )
    (tmp_path / "empty").mkdir()
    assert "has no events: use the --log-dir of a run.\n" in said(str(tmp_path / "empty"))
    assert "No such file or directory" in said(str(tmp_path / "none"), "--job", "x")
    (tmp_path / "torchelastic").symlink_to("/")
    assert "is not a directory owned by this user" in said()


def moved(agent: Agent, place: Path) -> Path:
    """Write a log as copied from another machine: no agent here wrote it."""
    run = place / "logs" / "run-a"
    run.mkdir(parents=True)
    shutil.copy(agent.log.path, run)
    shutil.rmtree(agent.registration.directory)
    return place / "logs"


@pytest.mark.parametrize("inside", ["", "run-a", "run-a/events.jsonl"])
def test_a_directory_from_another_machine_is_a_job(show, tmp_path, inside):
    agent = trained("job")
    agent.end(1, CAUSE.sentence(), CAUSE)
    where = moved(agent, tmp_path) / inside
    lines = show(str(where)).splitlines()
    assert lines[0].startswith("job  ")
    assert re.search(r"  ended .*, exit code 1$", lines[0])
    assert "  command       train.py" in lines
    assert "  rendezvous    node-a:29400" in lines
    assert "  recoveries" in lines
    assert "  recoveries\n" in show(str(where), "--job", "job")
    (data,) = json.loads(show(str(where), "--json"))
    assert (data["job"], data["alive"], data["exitcode"], data["step"]) == ("job", False, 1, 13)
    assert [(one["name"], one["exitcode"]) for one in data["agents"]] == [("node-a", 1)]


def test_a_job_from_another_machine_may_still_run(show, tmp_path):
    agent = Agent("job").world(0, "node-a")
    agent.log.close()
    first = show(str(moved(agent, tmp_path))).splitlines()[0]
    assert re.search("  last seen running .*(now|ago)$", first)


def test_a_directory_of_a_job_that_runs_here_is_that_job(show):
    agent = Agent("job").world(0, "node-a")
    agent.log.close()
    assert "  running for " in show(str(agent.log.path.parent)).splitlines()[0]
    (data,) = json.loads(show(str(agent.log.path), "--json"))
    assert (data["alive"], data["agents"][0]["pid"]) == (True, os.getpid())


def test_a_job_that_trains_shows_its_step_its_rate_where_the_time_went_and_its_recoveries(show):
    trained("job").log.close()
    text, details = show(), show("job")
    assert "  step 13, 1 steps/s, goodput " in text
    assert (
        "  last recovery, just now, cost 4.0 s: detect 1.0 s, agree 1.0 s, rebuild 500 ms," in text
    )
    assert "cause: rank 9 on node-b (local rank 1, pid 4242) at step 7: RuntimeError" in text
    for told in (
        "\n  goodput ",
        "training 13 s",
        " of 4 nodes trained, ",
        "\n  recoveries\n",
        "generation 0, failure: 4.0 s: detect 1.0 s",
        "\n  last failure\n",
    ):
        assert told in details
    trained("told to leave").end(143, "left the job (SIGTERM)")
    assert "\n  last failure\n" in show("told")


def test_progress_of_a_job_is_shown(show):
    achieved("job").log.close()
    told = "  loss[red] 2.5; 6,400 samples; checkpoint of step 4, 0 s and 1 step old\n"
    assert told in show()
    assert told in show("job")


def test_bad_steps_are_shown_with_rank_loss_norm_and_samples(show, capsys):
    agent = Agent("job").world(0, "node-a")
    for step, action in ((5, "retry"), (5, "skip")):
        samples = [{"epoch": 0, "ids": [4, 9], "size": 2, "span": [8, 12]}]
        bad = events.StepSkipped(1, step, "bad", "inf", "nan", 0.0, True, action, samples)
        agent.tell(bad, 0)
    agent.log.close()
    said = show("job")
    numbers = "bad (norm inf, loss nan) on rank 1, samples 4, 9"
    assert f"  1 bad step: step 5 is skipped: {numbers}\n" in said
    assert f"  step 5 is repeated: {numbers}\n" in said
    assert [one["step"] for one in json.loads(show("job", "--json"))[0]["bad_steps"]] == [5, 5]
    assert main(["skipped", "job"]) == EXIT_OK
    printed = capsys.readouterr()
    assert "torchelastic: 2 more samples are in no event log on this machine" in printed.err
    assert [json.loads(line) for line in printed.out.splitlines()] == [
        {"id": sample, "epoch": 0, "step": 5, "rank": 1, "origin": True, "action": "skip"}
        for sample in (4, 9)
    ]


def test_fixed_batch_shows_shares_and_the_hash_of_the_weights(show):
    agent = Agent("job").world(0, "node-a")
    agent.tell(events.Progress([0, 1], [5, 5], [0.0, 0.0], shares=[6, 2]), 0)
    agent.tell(events.WeightsHashed(0, 4, "3f2a" * 16), 0).log.close()
    said = show("job")
    assert "  micro-batches by rank: 6, 2\n" in said
    assert f"  weights sha256 {'3f2a' * 16} at step 4\n" in said


def test_json_has_the_same_picture(show):
    trained("job").log.close()
    (job,) = json.loads(show("--json"))
    assert (job["job"], job["alive"], job["phase"]) == ("job", True, "running")
    assert (job["generation"], job["size"]) == (1, 2)
    assert (job["nodes"][0]["name"], job["agents"][0]["pid"]) == ("node-a", os.getpid())
    assert job["history"][0]["why"] == "the job starts"
    assert (job["step"], job["rate"]) == (13, pytest.approx(1.0))
    assert [rank["step"] for rank in job["ranks"]] == [13, 13]
    (recovery,) = job["recoveries"]
    assert recovery["failure"]["rank"] == 9
    assert recovery["cost"] == pytest.approx(4.0)
    assert (recovery["rebuild"], recovery["transfer"]) == (pytest.approx(0.5), 0.5)
    parts = job["goodput"]["parts"]
    assert sum(parts.values()) + job["goodput"]["productive"] == pytest.approx(
        job["goodput"]["total"]
    )
    assert [world["generation"] for world in job["worlds"]] == [0, 1]


def test_details_name_the_stragglers_that_cost_most(show):
    agent = Agent("job").world(0, "node-a")
    for rank in range(12):
        slow = events.Straggler(rank, 1.0, 0.5, float(rank), f"rank {rank} is slow", lost=11.0)
        agent.tell(slow, 0)
    agent.log.close()
    lines = [line.strip() for line in show("job").splitlines()]
    first = lines.index("rank 11 is slow")
    assert lines[first + 8 : first + 10] == [
        "and 4 more stragglers",
        "waiting for stragglers has cost 11 s in total",
    ]


def test_names_and_messages_cannot_control_the_terminal(show):
    agent = Agent(f"job{HOSTILE}", f"node{HOSTILE}").world(0, f"node{HOSTILE}", reason=HOSTILE)
    cause = Failure(
        **CAUSE.to_json() | {"message": HOSTILE, "node": HOSTILE, "traceback": f"T\n{HOSTILE}"}
    )
    agent.tell(events.WorkerFailed(cause.to_json()), 0)
    agent.tell(events.GenerationOver("failure", HOSTILE), 0).world(1, HOSTILE)
    agent.tell(events.Straggler(0, 1.0, 0.5, 3.0, HOSTILE), 1)
    agent.tell(events.Progress([0], [5], [1.0], metrics={HOSTILE: 1.0}), 1)
    assert all(map(harmless, (show(), show("job"), show("--json"))))
    agent.end(1, HOSTILE, cause)
    assert all(map(harmless, (show(), show("job"))))
