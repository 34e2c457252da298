import pickle
import time

import pytest

from torchelastic.errors import TorchElasticError
from torchelastic.events.failure import Failure
from torchelastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torchelastic.worker import error_file

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 1\nRuntimeError: boom\n'


@pytest.fixture
def told(tmp_path):
    """The path of an error file."""
    path = str(tmp_path / "error.json")
    error_file.write(path, "RuntimeError: boom", TRACEBACK)
    return path


def failure(rank, **changes):
    facts = {
        "generation": 2,
        "node": "node-b",
        "rank": rank,
        "local_rank": rank % 2,
        "pid": 40 + rank,
        "exitcode": 1,
        "message": "RuntimeError: boom",
        "traceback": TRACEBACK,
        "error_file": "/logs/error.json",
        "wall_time": 1_700_000_000.5,
        "step": 17,
    }
    return Failure(**{**facts, **changes})


def test_a_process_that_told_has_its_message_as_torch_has_it(told):
    failed = ProcessFailure(0, 42, 1, told)

    assert failed.message["message"] == "RuntimeError: boom"
    assert failed.message["extraInfo"]["py_callstack"] == TRACEBACK
    assert int(failed.message["extraInfo"]["timestamp"]) == failed.timestamp
    assert failed.error_file_data == {"message": failed.message}
    assert failed.error_file == told
    assert abs(failed.timestamp - time.time()) < 60
    assert failed.signal_name() == "<N/A>"


@pytest.mark.parametrize(
    ("exitcode", "message", "name"),
    [(3, "exit code 3", "<N/A>"), (-9, "killed by SIGKILL", "SIGKILL")],
)
def test_a_process_that_did_not_tell_has_the_words_of_its_exit(exitcode, message, name):
    failed = ProcessFailure(0, 42, exitcode, "no/such/error.json")

    assert failed.message == message
    assert failed.signal_name() == name
    assert failed.error_file == "<N/A>"
    assert failed.timestamp <= time.time()


def test_an_error_file_of_plain_text_gives_that_text_and_a_broken_one_is_none(tmp_path):
    path = tmp_path / "error.json"
    path.write_text('{"message": "out of memory"}')
    assert ProcessFailure(0, 42, 1, str(path)).message == "out of memory"
    path.write_text('{"message": {"mess')

    failed = ProcessFailure(0, 42, 1, str(path))

    assert failed.message == "exit code 1"
    assert failed.error_file == "<N/A>"


def test_the_agents_record_of_a_failure_keeps_all_it_has():
    known = failure(3)

    made = ProcessFailure.from_failure(known)

    assert (made.local_rank, made.pid, made.exitcode) == (1, 43, 1)
    assert made.error_file == "/logs/error.json"
    assert made.message["extraInfo"]["py_callstack"] == TRACEBACK
    assert made.timestamp == 1_700_000_000
    assert made.to_failure(3) == known


def test_the_first_failure_is_the_one_that_is_known_to_be_or_else_the_earliest():
    early = ProcessFailure.from_failure(failure(1, wall_time=1.0))
    late = ProcessFailure.from_failure(failure(0, wall_time=2.0))
    both = {0: late, 1: early}
    assert ChildFailedError("train", both, first=0).get_first_failure() == (0, late)
    assert ChildFailedError("train", both).get_first_failure() == (1, early)
    with pytest.raises(ValueError, match="at least one"):
        ChildFailedError("train", {})


def test_the_text_names_the_cause_and_the_others():
    cause = ProcessFailure.from_failure(failure(3))
    other = ProcessFailure(0, 42, -6, "")

    text = str(ChildFailedError("train.py", {0: other, 3: cause}, first=3, reason="no more"))

    assert "train.py FAILED: no more" in text
    root = text.index("Root Cause (first observed failure):")
    assert root < text.index("rank      : 3 (local_rank: 1)") < text.index("RuntimeError: boom")
    assert text.index("rank 0 on") > text.index("rank      : 3")
    assert "SIGABRT" in text


def test_the_error_is_one_of_ours_and_survives_pickling():
    error = ChildFailedError("t", {1: ProcessFailure(1, 42, 3, "")}, first=1, reason="because")

    again = pickle.loads(pickle.dumps(error))

    assert isinstance(again, TorchElasticError)
    assert str(again) == str(error)
    assert again.get_first_failure()[0] == 1
