"""Step logs are read while they are written."""

import contextlib
import json

import pytest

from benchmarks.harness.step_logs import StepLogs

LINE = {"event": "step", "world": 1, "size": 1, "generation": 0, "rank": 0, "pid": 7, "began": 0.0}


def line(step):
    return json.dumps({**LINE, "step": step, "t": float(step)}) + "\n"


def test_whole_lines_are_read_once(tmp_path):
    with contextlib.closing(StepLogs(tmp_path / "logs")) as logs:
        assert logs.read().steps == [], "the directory comes later"
        (tmp_path / "logs").mkdir()
        first = tmp_path / "logs" / "1.jsonl"
        first.write_text(line(0) + line(1)[:9])
        assert [step.number for step in logs.read().steps] == [0]
        with first.open("a") as file:
            file.write(line(1)[9:])
        (tmp_path / "logs" / "2.jsonl").write_text(line(2))
        assert sorted(step.number for step in logs.read().steps) == [0, 1, 2]
        found = logs.wait_for(lambda seen: seen.first_finish(after=1.5), "a step", 0.0)
        assert found.number == 2
        with pytest.raises(TimeoutError, match="not seen within 0 s: more"):
            logs.wait_for(lambda seen: len(seen.steps) > 3, "more", 0.0)
