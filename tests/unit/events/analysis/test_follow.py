from __future__ import annotations

import os

from torchelastic.events.analysis.follow import Follower


def lines(follower: Follower, *paths) -> list[bytes]:
    return [line for _, line in follower.new_lines(paths)]


def test_a_line_is_read_once_and_when_it_is_whole(tmp_path):
    path, follower = tmp_path / "log", Follower()
    assert lines(follower, path) == []
    path.write_bytes(b"one\ntw")
    assert lines(follower, path) == [b"one"]
    assert lines(follower, path) == []
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert lines(follower, path) == [b"two"]
    assert follower.unfinished() == [(path, b"three")]
    follower.close()


def test_follower_skips_lines_already_known(tmp_path):
    path, follower = tmp_path / "log", Follower()
    path.write_bytes(b"one\n")
    follower.skip([path, tmp_path / "none"])
    with path.open("ab") as file:
        file.write(b"two\n")
    assert lines(follower, path) == [b"two"]
    follower.close()


def test_a_file_that_is_rotated_away_is_read_to_its_end_first(tmp_path):
    path, follower = tmp_path / "log", Follower()
    path.write_bytes(b"one\n")
    assert lines(follower, path) == [b"one"]
    with path.open("ab") as file:
        file.write(b"two\n")
    os.replace(path, tmp_path / "log.1")
    path.write_bytes(b"three\n")
    found = [line for _ in range(3) for line in lines(follower, path)]
    assert found == [b"two", b"three"]
    follower.close()


def test_a_file_that_is_gone_ends(tmp_path):
    path, follower = tmp_path / "log", Follower()
    path.write_bytes(b"one\n")
    assert lines(follower, path) == [b"one"]
    path.unlink()
    assert lines(follower, path) == lines(follower, path) == []
    follower.close()
