import io
import json
import os
import sys
import threading

import pytest

from tests.support import poll_for
from tests.unit.cli.cast import HOSTILE, Agent, harmless, trained
from torchelastic.cli import main
from torchelastic.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from torchelastic.events import types as events
from torchelastic.events.log import EventLog


@pytest.fixture
def show(capsys):
    def run(*argv: str) -> list[str]:
        assert main(["events", *argv]) == EXIT_OK
        return capsys.readouterr().out.splitlines()

    return run


def test_events_are_lines_with_time_node_and_generation(show):
    Agent("job").world(0, "node-a").end(0, "done")
    lines = show("job")
    assert [line.split("  ", 1)[1] for line in lines] == [
        "node-a        agent started (pid " + str(os.getpid()) + "): train.py",
        "node-a        hosts the rendezvous at node-a:29400",
        "node-a  g0    world formed with 2 workers on 1 node (node-a): the job starts",
        "node-a        ended with exit code 0: done",
    ]


def test_progress_is_shown_with_all_and_json_prints_the_lines(show):
    agent = trained("job")
    agent.log.close()
    assert not any("at step" in line and "ranks" in line for line in show("job"))
    assert sum("ranks 0, 1 at step" in line for line in show("job", "--all")) == 13
    told = [json.loads(line) for line in show("job", "--json")]
    written = [json.loads(line) for line in agent.log.path.read_text().splitlines()]
    assert told == written


def test_the_default_is_the_running_job_or_else_the_last_one(show, capsys):
    assert main(["events"]) == EXIT_USAGE
    assert "No job on this machine: pass the --log-dir of one." in capsys.readouterr().err
    Agent("old").end(0, "done")
    assert "done" in show()[-1]
    Agent("live").tell(events.Note("alive")).log.close()
    assert "alive" in show()[-1]
    Agent("other").log.close()
    assert main(["events"]) == EXIT_USAGE
    assert "Several jobs are running: choose one of " in capsys.readouterr().err


def test_a_job_may_be_given_as_a_directory(show, capsys):
    agent = Agent("job")
    agent.end(0, "done")
    place = str(agent.log.path.parent)
    assert show(place) == show("job")
    assert show(place, "--job", "job") == show("job")
    assert main(["events", place, "--job", "another"]) == EXIT_USAGE
    assert "has no events of job 'another'" in capsys.readouterr().err
    assert main(["events", "/nope", "--job", "x"]) == EXIT_USAGE
    assert "No such file or directory: /nope" in capsys.readouterr().err


def test_user_text_cannot_control_the_terminal(show):
    agent = Agent("job", f"n{HOSTILE}").tell(events.Note(HOSTILE))
    agent.tell(events.WorkerFailed({"message": HOSTILE, "rank": HOSTILE}), 0)
    agent.end(1, HOSTILE)
    assert harmless("\n".join(show("job")))


def test_following_goes_on_until_the_job_has_ended(monkeypatch):
    agent = Agent("job").tell(events.Note("before"))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    following = threading.Thread(target=main, args=(["events", "job", "--follow"],))
    following.start()
    try:
        poll_for(lambda: "before" in said.getvalue(), what="what is there")
        agent.tell(events.Note("meanwhile"))
        poll_for(lambda: "meanwhile" in said.getvalue(), what="what comes")
        path = agent.log.path.with_name("job.jsonl")
        collected = EventLog(path, job="job", node="id-node-b", clock=agent.clock)
        collected.emit(events.Note("gathered"))
        collected.close()
        poll_for(lambda: "gathered" in said.getvalue(), what="a file that appears")
    finally:
        agent.end(0, "the end")
        following.join(60)
    assert not following.is_alive()
    for word in ("before", "meanwhile", "gathered", "the end"):
        assert said.getvalue().count(word) == 1


# --- trace ---------------------------------------------------------------------------------------


def test_a_trace_is_written_or_an_error_says_why_not(tmp_path, capsys):
    trained("job").end(0, "done")
    path = tmp_path / "trace.json"
    assert main(["trace", "job", "-o", str(path)]) == EXIT_OK
    assert "Open it at ui.perfetto.dev" in capsys.readouterr().out
    entries = json.loads(path.read_text())["traceEvents"]
    assert {"generation 0", "generation 1", "step 3"} <= {entry["name"] for entry in entries}
    assert main(["trace", "job", "-o", str(tmp_path / "no" / "trace.json")]) == EXIT_FAILED
    assert "cannot write" in capsys.readouterr().err
    assert main(["trace", "nope"]) == EXIT_USAGE


def test_an_error_that_names_jobs_is_text_too(capsys):
    Agent(f"one{HOSTILE}").log.close()
    Agent(f"two{HOSTILE}").log.close()
    assert main(["events"]) == EXIT_USAGE
    text = capsys.readouterr().err
    assert harmless(text)
    assert text.count("\n") == 1
