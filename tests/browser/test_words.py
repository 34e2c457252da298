"""The page's decisions, called as they are in the browser."""

from __future__ import annotations

import dataclasses

from tests.browser.pictures import NOW, training

SECONDS = {
    0: "0 ms",
    0.0123: "12 ms",
    0.18: "0.18 s",
    0.9949: "0.99 s",
    3.14: "3.1 s",
    9.96: "10 s",
    34.9: "35 s",
    60: "1 min",
    200: "3 min 20 s",
    8000: "2 h 13 min",
    100_000: "1 d 3 h",
}
NUMBERS = {0: "0", 0.001234: "0.00123", 12.345: "12.3", 1234.5: "1,235", 1.2e-7: "1.2e-7"}
PLAIN = {
    "a\x1b[2Jb": "a\\x1b[2Jb",
    "\u202eevil": "\\u202eevil",
    "one\ttwo\nthree": "one\ttwo\nthree",
    "e\u0301": "e\u0301",
    "z" + "\u0335" * 9: "z" + "\u0335" * 3 + "…",
    "שלום": "שלום",
}


def test_numbers_and_texts_are_for_people(modules):
    assert {one: modules("words", "seconds", one) for one in SECONDS} == SECONDS
    assert {one: modules("words", "number", one) for one in NUMBERS} == NUMBERS
    assert {one: modules("words", "plain", one) for one in PLAIN} == PLAIN
    assert modules("words", "seconds", None) == "\u2013"
    assert modules("words", "rate", 12.51) == "12.5 steps/s"
    assert modules("words", "rate", 0.05) == "20 s per step"
    assert modules("words", "ranges", [0, 1, 2, 5, 7, 8]) == "0\u20132, 5, 7\u20138"
    assert modules("words", "oneLine", "first\nsecond") == "first"
    assert modules("words", "plain", "x" * 50, 10) == "x" * 10 + "…"
    assert modules("words", "plain", "x" * 5000, 10) == "x" * 10 + "… (5,000 characters)"


PHASES = {
    "Training": {},
    "Not progressing": {"stepped": NOW - 100, "rate": 0.0},
    "Starting": {"phase": "starting"},
    "Waiting for nodes": {"phase": "waiting"},
    "Recovering": {"phase": "restarting"},
    "Killed": {"phase": "died"},
    "Finished": {"phase": "ended", "exitcode": 0},
    "Failed": {"phase": "ended", "exitcode": 1},
    "Stopped": {"phase": "ended", "exitcode": 143},
}


def test_the_phase_is_reported_in_a_word(modules):
    views = {word: training(**changes).to_json() for word, changes in PHASES.items()}
    said = {word: modules("headline", "phase", view, NOW)["word"] for word, view in views.items()}
    assert said == {word: word for word in PHASES}


def test_a_job_whose_training_is_done_recovers_from_nothing(modules):
    view = training(phase="restarting").to_json()
    view["worlds"][-1]["end_kind"] = "finished"
    assert modules("headline", "phase", view, NOW)["word"] == "Finishing"


def test_a_recovery_names_the_failure_where_the_next_world_does_not(modules):
    one = {"why": "enough workers are available again", "failure": None}
    assert modules("recoveries", "why", one) == "enough workers are available again"
    fell = {"rank": 1, "node": "b", "message": "it hangs"}
    told = modules("recoveries", "why", one | {"failure": fell})
    assert told == "rank 1 on b: it hangs; enough workers are available again"
    named = {"why": "rank 1 on b (pid 4): it hangs; 1 of 3 restarts used", "failure": fell}
    assert modules("recoveries", "why", named) == named["why"]


def test_a_script_without_a_step_runs_and_is_not_called_good(modules):
    found = training().goodput
    assert found is not None
    silent = training(step=None, goodput=dataclasses.replace(found, steps_known=False))
    told = modules("headline", "phase", silent.to_json(), NOW)
    assert (told["word"], told["tone"]) == ("Running", "busy")
    assert modules("picture", "ratioOf", silent.to_json()["goodput"]) == "unknown"
    assert modules("picture", "ratioOf", training().to_json()["goodput"]).startswith("87.1")
    early = training(step=None).to_json()
    assert modules("headline", "phase", early, NOW)["word"] == "Starting"


def test_words_report_redone_steps_where_known(modules):
    found = training().to_json()["goodput"]
    assert modules("goodput", "again", found) == "4 steps redone, plus those in flight"
    unknown = modules("goodput", "again", found | {"redone_known": False})
    assert unknown == "redone steps unknown, other than those in flight"


def worlds(*members: str) -> list[dict[str, object]]:
    return [{"nodes": names.split(), "count": len(names.split())} for names in members]


def test_nodes_that_were_in_the_same_worlds_share_a_lane(modules):
    few = modules("lanes", "lanesOf", worlds("a b", "a", "a c"))
    assert [lane["names"] for lane in few] == [["a"], ["b"], ["c"]]
    assert [lane["worlds"] for lane in few] == [[0, 1, 2], [0], [2]]
    crowd = " ".join(f"n{place}" for place in range(200))
    many = modules("lanes", "lanesOf", worlds(crowd, f"{crowd} late", crowd))
    assert [len(lane["names"]) for lane in many] == [200, 1]
    unnamed = [{"nodes": ["a"], "count": 900}]
    assert modules("lanes", "lanesOf", unnamed)[1] == {"names": [], "beyond": 899, "worlds": [0]}


def test_a_replica_has_a_lane_with_the_worlds_that_had_it(modules):
    sizes = [(8, 4), (4, 4), (8, 4), (8, 0)]
    found = modules("lanes", "replicasOf", [dict(size=s, replica=r) for s, r in sizes])
    assert [lane["worlds"] for lane in found] == [[0, 1, 2], [0, 2]]
    assert found[1]["title"] == "replica 1: ranks 4 to 7"
    assert modules("words", "workerCount", 8, 4) == "2 replicas of 4 workers"
    assert modules("words", "workerCount", 8, 0) == "8 workers"


def test_lanes_are_bounded_whatever_nodes_did(modules):
    apart = worlds(*(f"n{place}" for place in range(300)))
    lanes = modules("lanes", "lanesOf", apart)
    assert len(lanes) == 60
    assert lanes[-1]["mixed"]
    assert sum(len(lane["names"]) for lane in lanes) == 300


def test_an_axis_has_some_ticks_at_round_times(modules):
    for length in (5, 90, 4000, 90_000, 30 * 86_400):
        ticks = modules("lanes", "ticks", [NOW, NOW + length], 900)
        assert 2 <= len(ticks["at"]) <= 12, length
        assert all(moment % ticks["step"] == 0 for moment in ticks["at"]), length
