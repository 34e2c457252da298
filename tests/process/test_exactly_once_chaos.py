"""Nothing is lost and nothing used twice, whatever is killed, frozen, leaves and joins.

A schedule of faults made from a seed (`chaos_schedule`) is done to a real job (`chaos_driver`),
whose workers keep a record of their own (`chaos_worker`). Afterwards the ledger, that record and
the parameters of the model must all say that each sample was used once an epoch (`chaos_record`).
A failure names the seed and the faults.
"""

from __future__ import annotations

import pytest

from tests.process.chaos_driver import started
from tests.process.chaos_record import proven
from tests.process.chaos_schedule import KINDS, NODES, schedule
from tests.process.jobs import job
from tests.support import SOAK

SAMPLES = 96
#: Workers are started hundreds of times: what all of them import is imported once a node.
PRELOAD = "torchelastic.data,torchelastic.p2p,torchelastic.training.state.torch_state"
FLAGS = f"--settle=0.2 --progress-timeout=4 --preload={PRELOAD}"
#: What a single node can do, which has to import torch but once.
FEW = {"kill": 4, "kill-entering": 1}
#: Some of each.
SOME = {kind: 1 for kind in KINDS} | {"kill": 6, "join": 2}


def run(
    directory, mode: str, kinds: dict[str, int], *, nodes: int = NODES, seed: int = 1, **more: int
) -> None:
    with job(directory / "job", f"{FLAGS} --nnodes={'2:4' if nodes > 1 else 1}") as made:
        chaos = started(made, mode, nodes=nodes, samples=SAMPLES, **more)
        try:
            for fault in schedule(seed, mode, kinds, nodes):
                chaos.strike(fault)
            chaos.finish()
            wrong = proven([chaos.record], [chaos.ledger], samples=SAMPLES, mode=mode)
            assert not wrong, chaos.told("\n".join(wrong))
        except AssertionError as error:
            raise AssertionError(f"mode {mode}, seed {seed}: {error}") from None


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["script", "train"])
def test_a_few_faults(tmp_path, mode):
    """To three workers, each with a loading process."""
    run(tmp_path, mode, FEW, nodes=1, workers=3, loaders=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["script", "train"])
def test_faults_of_every_kind(tmp_path, mode):
    run(tmp_path, mode, SOME)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 1 + SOAK))
@pytest.mark.parametrize("mode", ["script", "train"])
def test_fifty_faults(tmp_path, mode, seed):
    run(tmp_path, mode, KINDS, seed=seed)
