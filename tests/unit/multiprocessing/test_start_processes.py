"""What `start_processes` refuses before it starts anything, and its small parts."""

import pytest

from torchelastic.config import Std
from torchelastic.errors import ConfigError
from torchelastic.multiprocessing import ProcessFailure, RunProcsResult, start_processes, to_map


@pytest.mark.parametrize(
    ("args", "envs"),
    [
        ({}, {}),
        ({0: ()}, {0: {}, 1: {}}),
        ({0: (), 1: ()}, {0: {}}),
        ({1: ()}, {1: {}}),
    ],
)
def test_every_local_rank_needs_arguments_and_an_environment(args, envs, tmp_path):
    with pytest.raises(ConfigError, match="for every local rank"):
        start_processes("echo", "true", args, envs, str(tmp_path))


def test_a_log_directory_in_use_is_refused(tmp_path):
    (tmp_path / "somebody's").touch()

    with pytest.raises(ConfigError, match="not empty"):
        start_processes("echo", "true", {0: ()}, {0: {}}, str(tmp_path))


def test_a_log_directory_must_be_one(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(NotADirectoryError):
        start_processes("echo", "true", {0: ()}, {0: {}}, str(tmp_path / "file"))
    with pytest.raises(FileNotFoundError):
        start_processes("echo", "true", {0: ()}, {0: {}}, str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (Std.OUT, {0: Std.OUT, 1: Std.OUT}),
        ({1: Std.ERR}, {0: Std.NONE, 1: Std.ERR}),
        ({0: Std.ALL, 1: Std.OUT, 2: Std.ERR}, {0: Std.ALL, 1: Std.OUT}),
    ],
)
def test_streams_are_spelled_out_for_every_local_rank(given, made):
    assert to_map(given, 2) == made


def test_one_failure_makes_a_failed_result():
    assert not RunProcsResult(return_values={0: None}).is_failed()
    assert RunProcsResult(failures={0: ProcessFailure(0, 42, 1, "")}).is_failed()
