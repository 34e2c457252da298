"""Programs written for release 0.1 run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.process.jobs import job
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.utils.data import ElasticDistributedSampler

USER = Path(__file__).with_name("user01.py")
STEPS = 60


def plainly_trained() -> float:
    """The sum of the parameters that one process has which takes the samples of both ranks."""
    dataset = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pairs: list[tuple[int, int]] = []
    for epoch in range(2):
        samplers = [
            ElasticDistributedSampler(dataset, num_replicas=2, rank=rank) for rank in (0, 1)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        pairs += zip(*samplers, strict=True)
    for pair in pairs[:STEPS]:
        optimizer.zero_grad()
        model(dataset[list(pair)]).square().mean().backward()
        optimizer.step()
    return sum(parameter.sum().item() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_of_01_comes_to_the_same_when_a_worker_is_killed(tmp_path, monkeypatch):
    fault = "kill@place=collective.launched,rank=1,step=30"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", fault)
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2 --world-sizes=2") as one:
        node = one.start(script=[str(USER), str(tmp_path / "checkpoints"), str(STEPS)])
        assert node.wait(120) == 0, node.stderr
    assert [ended["exitcode"] for ended in node.events("worker-exited")] == [-9, 0, 0]
    first, second = re.findall(r"steps 60 epoch (\d+) index (\d+) sum (\S+)", node.stdout)
    assert first == second
    # An epoch has 48 samples for each of the two ranks.
    assert first[:2] == ("1", "24")
    assert float(first[2]) == pytest.approx(plainly_trained(), rel=1e-4)
    assert "][user]: __main__.train_step.success=1" in node.stdout
    manager = FileSystemCheckpointManager(tmp_path / "checkpoints")
    assert manager.get_latest_checkpoint() is not None
