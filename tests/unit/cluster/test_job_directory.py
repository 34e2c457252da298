"""The directory that a submitted job has on shared storage."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.errors import ConfigError


def test_only_its_owner_can_read_the_secret(tmp_path):
    made = JobDirectory.create(tmp_path / "jobs" / "one")
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.secret.stat().st_mode & 0o777 == 0o600
    assert len(made.secret.read_text().strip()) == 64
    other = JobDirectory.create(tmp_path / "jobs" / "two")
    assert other.secret.read_text() != made.secret.read_text()


def test_an_existing_directory_is_not_used_again(tmp_path):
    with pytest.raises(ConfigError, match="exists already: name another one"):
        JobDirectory.create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot create .* \(Not a directory\)"):
        JobDirectory.create(tmp_path / "file" / "job")


def test_node_that_starts_after_the_end_is_too_late(tmp_path):
    made = JobDirectory.create(tmp_path / "job")
    assert made.why_too_late("7") == ""
    made.note_finished("7", 120)
    made.note_finished("7", 120)
    assert made.why_too_late("7") == (
        "Job '7' finished at step 120: this node is too late and has nothing to do."
    )
    assert made.why_too_late("8") == "", "another job in the same directory"
    made.note_finished("7", -1)
    assert "finished: this node" in made.why_too_late("7")
    assert {path.name for path in made.path.iterdir()} == {"secret", "finished"}
    for wrong in ("", "3", '{"job": "7"}', '{"job": "7", "step": null}'):
        (made.path / "finished").write_text(wrong)
        assert made.why_too_late("7") == ""


def test_the_first_node_makes_what_is_missing(tmp_path):
    it = JobDirectory(tmp_path / "jobs" / "one")
    with ThreadPoolExecutor(8) as nodes:
        list(nodes.map(lambda _: it.prepare(), range(8)))
    secret = it.secret.read_text()
    assert len(secret.strip()) == 64
    assert it.path.stat().st_mode & 0o777 == 0o700
    assert it.secret.stat().st_mode & 0o777 == 0o600
    it.prepare()
    assert it.secret.read_text() == secret
    assert [path.name for path in it.path.iterdir()] == ["secret"]
