"""Random cuts of the network between the nodes of a job (`chaos_cuts`): no law is broken, no sample
lost or used twice, and all nodes train within 30 s after each cut. A failure names its seed."""

from __future__ import annotations

import pytest

from tests.process import chaos_cuts
from tests.support import SOAK

pytestmark = [pytest.mark.needs("namespaces", "etcd"), pytest.mark.timeout(900)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "store"), [("train", "etcd"), ("keep", "embedded")])
def test_two_cuts(tmp_path, mode, store):
    chaos_cuts.run(tmp_path, 1, count=2, mode=mode, store=store)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 2 + SOAK))
def test_six_cuts(tmp_path, seed):
    chaos_cuts.run(tmp_path, seed)
