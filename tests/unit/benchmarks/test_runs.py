"""What the command lines of the benchmarks share."""

from argparse import Namespace

import pytest

from benchmarks.harness import runs


class Run:
    def __init__(self, arguments):
        self.results = []

    def perform(self, row):
        if row == "interrupted":
            raise KeyboardInterrupt
        self.results.append(row)

    def finish(self):
        self.results.append("finished")


@pytest.mark.parametrize(
    ("rows", "everything", "flags", "saved", "exitcode"),
    [
        (("a", "b"), True, {}, True, 0),
        (("a",), False, {}, False, 0),
        (("a",), False, {"save": True}, True, 0),
        (("a", "b"), True, {"no_save": True}, False, 0),
        (("a", "interrupted", "b"), True, {"save": True}, False, 130),
    ],
)
def test_runs_are_saved_only_if_complete_or_asked(
    rows, everything, flags, saved, exitcode, capsys, monkeypatch
):
    monkeypatch.setattr(runs, "end_in_order", lambda: None)
    monkeypatch.setattr(runs.processes, "become_subreaper", lambda: None)
    arguments = Namespace(**{"rows": rows, "save": False, "no_save": False, **flags})
    kept = []

    def save(results, rendered):
        kept.append((list(results), rendered))

    ended = runs.carry_out(arguments, Run, " ".join, save, everything=everything)

    shown = capsys.readouterr().out.strip()
    assert ended == exitcode
    assert shown.endswith("finished"), "what there is is shown, come what may"
    assert kept == ([([*rows, "finished"], shown)] if saved else [])
