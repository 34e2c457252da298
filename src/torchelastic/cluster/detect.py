"""Find the platform that started this process. Pure: no network, no subprocess, no torch."""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.cluster import (
    indexed_job,
    kubeflow,
    ray_driver,
    runai,
    skypilot,
    slurm,
    torchx_replica,
    volcano,
)
from torchelastic.cluster.platform import PlatformFacts, ReadFile

#: In this order: the first that recognises its own environment wins. Pods of a TrainJob
#: are also pods of an Indexed Job, and those of Run:ai may be any of them; TorchX submits to Slurm
#: and Volcano, too.
PLATFORMS = (
    torchx_replica.detect,
    slurm.detect,
    ray_driver.detect,
    kubeflow.detect_pytorchjob,
    kubeflow.detect_trainjob,
    indexed_job.detect,
    volcano.detect,
    runai.detect,
    skypilot.detect,
)


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    """Return what the platform says; None without a platform."""
    found = (asked(environ, read_file) for asked in PLATFORMS)
    return next((each for each in found if each is not None), None)
