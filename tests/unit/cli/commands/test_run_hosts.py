"""The job that `run --hosts` hands to its launcher."""

import pytest

from torchelastic.cli import main
from torchelastic.hosts import host_launcher


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The jobs that were launched, from a directory with a script."""
    launched = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_launcher, "run_on_hosts", lambda job: launched.append(job) or 0)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "none").write_text("")
    return launched


@pytest.mark.parametrize(
    ("flags", "nodes", "workers"),
    [
        ("--hosts a,b", (1, 2), 1),
        ("--hosts a,b --nproc-per-node 8", (1, 2), 8),
        ("--hosts a,b -j 2x8", (2, 2), 8),
        # Counted on each host, whatever this machine has.
        ("--hosts a,b --nproc-per-node xpu", (1, 2), "xpu"),
        # A list that is empty at first may grow.
        ("--hosts-from none", (1, host_launcher.MOST_HOSTS), 1),
    ],
)
def test_nodes_and_workers(jobs, flags, nodes, workers):
    assert main(["run", *flags.split(), "train.py"]) == 0
    [job] = jobs
    assert (job.config.min_nodes, job.config.max_nodes) == nodes
    assert job.workers == workers
    assert job.config.rdzv_endpoint


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--hosts a,b --nnodes 9", 64),
        ("--hosts a,b --nnodes 3:9", 64),
        ("--hosts a,b --nnodes 1:9", 0),
        # Others may join there.
        ("--hosts a,b --nnodes 3 --rdzv-endpoint c:29400", 0),
        ("--hosts-from none --nnodes 3", 0),
    ],
)
def test_run_hosts_fewer_than_min_nodes_are_refused(jobs, capsys, flags, code):
    assert main(["run", *flags.split(), "train.py"]) == code
    refused = "(--nnodes), but --hosts lists 2: list more hosts, or lower --nnodes."
    assert (refused in capsys.readouterr().err) is bool(code)
