"""What `start_processes` refuses before it starts anything, and its small parts."""

import pytest

from torchelastic.config import Std
from torchelastic.errors import ConfigError
from torchelastic.multiprocessing import ProcessFailure, RunProcsResult, start_processes, to_map


def test_every_local_rank_needs_arguments_and_an_environment(tmp_path):
    for args, envs in (
        ({}, {}),
        ({0: ()}, {0: {}, 1: {}}),
        ({0: (), 1: ()}, {0: {}}),
        ({1: ()}, {1: {}}),
    ):
        with pytest.raises(ConfigError, match="for every local rank") as refused:
            start_processes("echo", "true", args, envs, str(tmp_path))
        assert isinstance(refused.value, RuntimeError), "what 0.2's callers catch"


def test_a_log_directory_must_be_one_and_empty(tmp_path):
    def start(path):
        start_processes("echo", "true", {0: ()}, {0: {}}, str(path))

    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="not empty"):
        start(tmp_path)
    with pytest.raises(NotADirectoryError):
        start(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        start(tmp_path / "missing")


def test_a_program_must_be_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="Program not found: no-such-program"):
        start_processes("echo", "no-such-program", {0: ()}, {0: {}}, str(tmp_path))


def test_streams_are_spelled_out_for_every_local_rank():
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.ERR}, 2) == {0: Std.NONE, 1: Std.ERR}
    given = {0: Std.ALL, 1: Std.OUT, 2: Std.ERR}
    assert to_map(given, 2) == {0: Std.ALL, 1: Std.OUT}


def test_one_failure_makes_a_failed_result():
    assert not RunProcsResult(return_values={0: None}).is_failed()
    assert RunProcsResult(failures={0: ProcessFailure(0, 42, 1, "")}).is_failed()
