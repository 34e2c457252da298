from __future__ import annotations

import importlib.util

import pytest

from tests.unit.cli.test_status import CAUSE, HOSTILE, Agent, achieved, at_one_moment, trained
from torchelastic.cli import top
from torchelastic.errors import EXIT_OK, EXIT_USAGE
from torchelastic.events import types as events

__all__ = ["at_one_moment"]  # a fixture of these tests, too

needs_rich = pytest.mark.skipif(
    importlib.util.find_spec("rich") is None, reason="needs the extra 'top'"
)


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def test_without_rich_a_sentence_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(top, "find_spec", lambda name: None)
    assert top.main([]) == EXIT_USAGE
    assert "pip install 'torchelastic[top]'" in capsys.readouterr().err


@needs_rich
def test_the_screen_shows_the_job(capsys):
    trained("job").tell(events.Straggler(1, 2.0, 1.0, 7.0, "rank 1 is slow"), 1).log.close()
    assert top.main(["job", "--once"]) == EXIT_OK
    text = capsys.readouterr().out
    for told in (
        "generation 1: 2 workers on 1 node ",
        "step 13",
        "goodput 6",
        "node-a  running",
        "rank 1 is slow",
        "failure   4.0 s: detect 1.0 s",
        "generation 1 began",
    ):
        assert told in text


@needs_rich
def test_each_rank_is_shown_with_its_rate_and_its_own_part_of_a_step(capsys):
    agent = Agent("job").world(0, "node-a")
    for step in (1, 2):
        told = events.Progress([0], [step], [agent.clock.now() + 1], own=[step * 0.25])
        agent.tell(told, 0)
    agent.log.close()
    assert top.main(["job", "--once"]) == EXIT_OK
    [row] = [line for line in capsys.readouterr().out.splitlines() if "steps/s  " in line]
    assert row.split() == ["0", "node-a", "2", "1", "steps/s", "250", "ms"]


@needs_rich
def test_a_straggler_does_not_push_its_rank_off_a_narrow_screen(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    agent = Agent("job").world(0, "node-a")
    for step in (1, 2):
        agent.tell(events.Progress([0], [step], [agent.clock.now() + 1], own=[0.25]), 0)
    agent.tell(events.Straggler(0, 2.0, 1.0, 7.0, "rank 0 on node-a is slow: " + "x" * 90), 0)
    agent.log.close()
    assert top.main(["job", "--once"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if "steps/s  " in line]
    assert row.split()[:5] == ["0", "node-a", "2", "1", "steps/s"]
    assert max(map(len, lines)) <= 80


@needs_rich
def test_what_a_job_has_achieved_is_on_the_screen(capsys):
    achieved("job").log.close()
    assert top.main(["job", "--once"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "loss[red] 2.5  6,400 samples  checkpoint of step 4, 0 s and 1 step old" in text


@needs_rich
def test_a_job_that_has_ended_says_when_and_on_how_many_nodes_it_ran(capsys):
    trained("job").end(0, "every worker succeeded")
    assert top.main(["job", "--once"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "job  ended 0 s ago after 0 s, exit code 0  generation 1: 2 workers on 1 node " in text


@needs_rich
def test_a_job_that_has_just_started(capsys):
    Agent("job").log.close()
    assert top.main(["job", "--once"]) == EXIT_OK
    assert "starting" in capsys.readouterr().out


@needs_rich
def test_names_are_neither_markup_nor_control_sequences(capsys):
    name = f"[red]n[/red]{HOSTILE}"
    agent = Agent("job", name).world(0, name, reason=f"[link=http://x]{HOSTILE}")
    agent.tell(events.WorkerFailed(CAUSE.to_json() | {"message": HOSTILE}), 0)
    agent.tell(events.GenerationOver("failure", HOSTILE), 0).log.close()
    assert top.main(["job", "--once"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "[red]n[/red]" in text
    assert not set(text) & {"\x07", "\r", "\u202e", "\x9b"}
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text


@needs_rich
def test_big_jobs_fit(capsys):
    agent = Agent("job").world(0, *(f"node-{number}" for number in range(300)))
    ranks = list(range(600))
    agent.tell(events.Progress(ranks, [5] * 600, [1.0] * 600), 0).log.close()
    assert top.main(["job", "--once"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "and 293 more" in text
    assert "and 584 more" in text
    assert len(text.splitlines()) < 60
