import io
import os
import sys
import threading

import pytest

from tests.support import poll_for
from tests.unit.cli.cast import HOSTILE, Agent, harmless
from torchelastic.cli import main
from torchelastic.errors import EXIT_OK, EXIT_USAGE
from torchelastic.events import job_registry
from torchelastic.events import types as events


def write(agent: Agent, attempt: int, local_rank: int, text: str, stream: str = "stdout") -> None:
    path = agent.log.path.parent / f"attempt_{attempt}" / str(local_rank) / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode())


@pytest.fixture
def agent() -> Agent:
    """Two workers and their output."""
    agent = Agent("job").world(0, "node-a").tell(events.WorkersStarted([0, 1], [8, 9], 0.1), 0)
    write(agent, 0, 0, "zero\n")
    write(agent, 0, 1, "one\ntwo\n")
    write(agent, 0, 1, "warning\n", "stderr")
    return agent


@pytest.fixture
def show(capsys):
    def run(*argv: str) -> list[str]:
        assert main(["logs", *argv]) == EXIT_OK, capsys.readouterr().err
        return capsys.readouterr().out.splitlines()

    return run


def test_output_by_rank_without_a_prefix_for_a_single_rank(agent, show):
    assert show("job") == ["rank 0: zero", "rank 1: one", "rank 1: two", "rank 1 stderr: warning"]
    assert show("job", "--rank", "1") == ["one", "two", "warning"]
    assert show("job", "--rank", "1", "--lines", "1") == ["two", "warning"]


def test_a_generation_has_its_own_logs(agent, show):
    agent.world(1, "node-a").tell(events.WorkersStarted([0, 1], [10, 11], 0.1), 1)
    write(agent, 1, 0, "again\n")
    assert show("job", "--rank", "0") == ["again"]
    assert show("job", "--rank", "0", "--generation", "0") == ["zero"]


def test_a_resident_worker_writes_to_the_logs_of_its_first_generation(agent, show):
    """Rank 1 was replaced: the replacement writes to the next generation's logs."""
    write(agent, 1, 1, "replaced\n")
    agent.world(5, "node-b", "node-a").tell(events.Progress([2, 3], [7, 7], [1.0, 1.0]), 5)
    assert show("job", "--rank", "2") == ["zero"]
    assert show("job", "--rank", "3") == ["replaced"]


def test_ranks_of_other_machines_are_named(agent, show, capsys):
    agent.log.emit(events.Note("x"))
    other = Agent("job", "node-b").tell(events.WorkersStarted([2, 3], [1, 2], 0.1), 0)
    assert main(["logs", "job"]) == EXIT_OK
    told = capsys.readouterr()
    assert told.err == "torchelastic logs: no logs on this machine for ranks 2, 3\n"
    assert "zero" in told.out
    other.log.close()


def test_missing_logs_are_explained_in_a_sentence(agent, capsys):
    Agent("without").world(0, "node-a").tell(events.WorkersStarted([0, 1], [8, 9], 0.1), 0)
    assert main(["logs", "without"]) == EXIT_USAGE
    assert "their output went to a terminal (--tee 3" in capsys.readouterr().err
    assert main(["logs", "job", "--rank", "7"]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert "No such rank: generation 0 has ranks 0 to 1. Use --generation N for an earlier" in told


def test_lines_cannot_control_the_terminal(agent, show):
    write(agent, 0, 0, f"{HOSTILE}\n10%\r20%\r30%\r\nno end")
    lines = show("job", "--rank", "0")
    assert harmless("".join(lines))
    assert lines[-4:] == ["10%", "20%", "30%", "no end"]


def test_raw_is_every_byte(agent, capfdbinary):
    write(agent, 0, 0, "\x1b[1mbold\x1b[0m\n")
    assert main(["logs", "job", "--rank", "0", "--raw"]) == EXIT_OK
    assert capfdbinary.readouterr().out == b"zero\n\x1b[1mbold\x1b[0m\n"


def test_following_goes_on_into_the_next_generation(agent, monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    following = threading.Thread(target=main, args=(["logs", "job", "--rank", "0", "--follow"],))
    following.start()
    try:
        poll_for(lambda: "zero" in said.getvalue(), what="what is there")
        write(agent, 0, 0, "more\n")
        poll_for(lambda: "more" in said.getvalue(), what="what comes")
        write(agent, 1, 0, "reborn\n")
        agent.world(1, "node-a").tell(events.WorkersStarted([0, 1], [10, 11], 0.1), 1)
        poll_for(lambda: "reborn" in said.getvalue(), what="the next generation")
        write(agent, 1, 0, "last words")
    finally:
        agent.end(0, "done")
        following.join(60)
    assert not following.is_alive()
    assert said.getvalue().split() == ["zero", "more", "reborn", "last", "words"]


def test_logs_may_lie_apart_from_the_events(show, tmp_path):
    agent = Agent("job").world(0, "node-a").tell(events.WorkersStarted([0, 1], [8, 9], 0.1), 0)
    place = tmp_path / "elsewhere"
    own = {"pid": os.getpid(), "name": "node-a", "endpoint": "", "command": []}
    job_registry.register("job", "id-node-a", **own, events=agent.log.path, logs=place)
    (place / "attempt_0" / "1").mkdir(parents=True)
    (place / "attempt_0" / "1" / "stdout.log").write_text("there\n")
    assert show("job", "--rank", "1") == ["there"]
