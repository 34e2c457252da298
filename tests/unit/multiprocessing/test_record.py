import json
import sys

import pytest

from torchelastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
    record,
)
from torchelastic.worker import error_file


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Where an exception is to be written."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


class Quiet(ErrorHandler):
    """Leaves the fault handler, which pytest uses, alone; notes what it is told."""

    def __init__(self):
        self.calls = []

    def initialize(self):
        self.calls.append("initialize")

    def record_exception(self, error):
        self.calls.append(error)
        super().record_exception(error)


def fail(error, handler=None):
    """A recorded function that raises this error."""

    @record(error_handler=handler or Quiet())
    def main(error):
        raise error

    with pytest.raises(type(error)) as caught:
        main(error)
    assert caught.value is error


def test_an_exception_is_written_as_torch_writes_it_and_raised(told):
    handler, boom = Quiet(), RuntimeError("boom")
    fail(boom, handler)
    assert handler.calls == ["initialize", boom]
    message = json.loads(told.read_text())["message"]
    assert message["message"] == "RuntimeError: boom"
    assert "raise error" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_results_arguments_and_name_pass_through(told):
    @record(error_handler=Quiet())
    def main(a, *, b):
        """What it does."""
        return a + b

    assert main(1, b=2) == 3
    assert (main.__name__, main.__doc__) == ("main", "What it does.")
    assert not told.exists()


def test_exit_with_success_is_a_return_and_exit_with_failure_is_no_exception(told):
    leave = record(sys.exit, error_handler=Quiet())

    assert leave(0) is None
    assert leave() is None
    with pytest.raises(SystemExit):
        leave(3)
    assert not told.exists()


def test_of_a_failed_child_its_own_error_is_recorded(told, tmp_path):
    child = str(tmp_path / "child.json")
    error_file.write(child, "ValueError: the cause", "Traceback of the child")
    fail(ChildFailedError("child", {0: ProcessFailure(0, 42, 1, child)}))
    assert error_file.read(str(told)) == error_file.read(child)


def test_a_child_without_an_error_file_is_recorded_by_the_words_of_its_end(told):
    fail(ChildFailedError("child", {0: ProcessFailure(0, 42, -9, "")}))
    assert "killed by SIGKILL" in error_file.read(str(told)).message


def test_the_first_to_tell_is_kept(told):
    error_file.write(str(told), "ValueError: first", "")
    fail(RuntimeError("second"))
    assert error_file.read(str(told)).message == "ValueError: first"


def test_an_error_file_that_is_not_there_or_cannot_be_written_hides_nothing(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    fail(RuntimeError("boom"))
    assert caplog.text == ""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    fail(RuntimeError("boom"))
    assert "Could not write the error file" in caplog.text
