import pytest

from tests.unit.cli.cast import CAUSE, HOSTILE, Agent, achieved, trained
from torchelastic.cli import main
from torchelastic.errors import EXIT_OK
from torchelastic.events import types as events

pytestmark = pytest.mark.usefixtures("at_one_moment")


@pytest.fixture
def screen(monkeypatch, capsys):
    """Return the screen of the job at this width."""

    def show(agent: Agent, columns: int = 160) -> str:
        agent.log.close()
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["top", "job", "--once"]) == EXIT_OK
        return capsys.readouterr().out

    return show


def test_the_screen_shows_the_job(screen):
    text = screen(trained("job").tell(events.Straggler(1, 2.0, 1.0, 7.0, "rank 1 is slow"), 1))
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


def test_each_rank_is_shown_with_its_rate_and_its_own_part_of_a_step_however_narrow(screen):
    agent = Agent("job").world(0, "node-a")
    for step in (1, 2):
        told = events.Progress([0], [step], [agent.clock.now() + 1], own=[step * 0.25])
        agent.tell(told, 0)
    [row] = [line for line in screen(agent).splitlines() if "steps/s  " in line]
    assert row.split() == ["0", "node-a", "2", "1", "steps/s", "250", "ms"]
    agent.tell(events.Straggler(0, 2.0, 1.0, 7.0, "rank 0 on node-a is slow: " + "x" * 90), 0)
    lines = screen(agent, 80).splitlines()
    [row] = [line for line in lines if "steps/s  " in line]
    assert row.split()[:5] == ["0", "node-a", "2", "1", "steps/s"]
    assert max(map(len, lines)) <= 80
    assert "rank 0 on node-a is slow" in "".join(lines)


def test_top_shows_metrics_samples_and_checkpoint(screen):
    told = "loss[red] 2.5  6,400 samples  checkpoint of step 4, 0 s and 1 step old"
    assert told in screen(achieved("job"))


def test_a_job_that_has_just_started_and_one_that_has_ended(screen):
    assert "starting" in screen(Agent("job"))
    agent = trained("job")
    agent.end(0, "every worker succeeded")
    told = "job  ended 0 s ago after 0 s, exit code 0  generation 1: 2 workers on 1 node "
    assert told in screen(agent)


def test_names_are_neither_markup_nor_control_sequences(screen):
    name = f"[red]n[/red]{HOSTILE}"
    agent = Agent("job", name).world(0, name, reason=f"[link=http://x]{HOSTILE}")
    agent.tell(events.WorkerFailed(CAUSE.to_json() | {"message": HOSTILE}), 0)
    text = screen(agent.tell(events.GenerationOver("failure", HOSTILE), 0))
    assert "[red]n[/red]" in text
    assert not set(text) & {"\x07", "\r", "\u202e", "\x9b"}
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text


def test_big_jobs_fit(screen):
    agent = Agent("job").world(0, *(f"node-{number}" for number in range(300)))
    text = screen(agent.tell(events.Progress(list(range(600)), [5] * 600, [1.0] * 600), 0))
    assert "and 293 more" in text
    assert "and 584 more" in text
    assert len(text.splitlines()) < 60
