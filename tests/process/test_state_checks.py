"""Silent corruption: a worker whose state differs from that of its replicas."""

from __future__ import annotations

import pytest

from tests.process.test_fixed_batches import digests

#: Every five steps; the last check is after step 15.
KEYS = {"steps": 17, "check": 5, "bucket": 3000}


@pytest.mark.parametrize(
    "flip", ["1:7:parameter:0:20:0", "2:8:state:3:20:5", "0:6:parameter:2:20:3:9"]
)
def test_flipped_bit_is_undone_and_its_worker_replaced(tmp_path, flip):
    """One of three workers; the job has no restart to use. Starts two jobs: about 10 s."""
    alone, _ = digests(tmp_path / "alone", 1, **KEYS)
    found, made = digests(tmp_path / "flipped", 3, "--max-restarts=0", **KEYS, flip=flip)
    assert found == alone, made.said()
    (differed,) = made.nodes[0].events("states-differed")
    assert (differed["ranks"], differed["back"]) == ([int(flip[0])], 5), made.said()
    (killed,) = made.nodes[0].events("worker-killed")
    assert killed["rank"] == int(flip[0])
    assert len(made.lines(event="flipped")) == 1


def test_wrong_rank_of_a_script_is_named_and_restarted(tmp_path):
    keys = {**KEYS, "flip": "1:7:parameter:0:20:0", "mode": "keep"}
    _, made = digests(tmp_path, 3, "--max-restarts=1", **keys)
    failed = [event["failure"] for event in made.nodes[0].events("worker-failed")]
    assert any(
        one["message"].startswith("OtherBitsError: the state of rank 1 differs") for one in failed
    ), made.said()
    decided = made.nodes[0].events("restart-decided")
    assert decided[0]["cause"]["rank"] == 1


@pytest.mark.parametrize(
    "flip", ["1:7:parameter:0:20:0", "0:8:state:0:20:0", "1:9:parameter:0:20:0"]
)
def test_one_of_two_workers_is_wrong_and_the_steps_taken_again_show_which(tmp_path, flip):
    """Starts two jobs: about 10 s. The last bit flips just before the check."""
    alone, _ = digests(tmp_path / "alone", 1, **KEYS)
    found, made = digests(tmp_path / "flipped", 2, "--max-restarts=0", **KEYS, flip=flip)
    assert found == alone, made.said()
    (differed,) = made.nodes[0].events("states-differed")
    assert (differed["ranks"], differed["back"]) == ([], 5)
    assert f"rank {flip[0]} had a wrong state" in made.said()
    assert made.nodes[0].events("worker-killed") == []
