"""Find the platform that started this process. Pure: no network, no subprocess, no torch."""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.cluster import (
    indexed_job,
    pytorchjob,
    ray_driver,
    runai,
    skypilot,
    slurm,
    torchx_replica,
    trainjob,
    volcano,
)
from torchelastic.cluster.platform import PlatformFacts, ReadFile

#: In this order: the first that recognises its own environment wins. Pods of a TrainJob
#: are also pods of an Indexed Job, and those of Run:ai may be any of them; TorchX submits to Slurm
#: and Volcano, too.
PLATFORMS = (
    torchx_replica,
    slurm,
    ray_driver,
    pytorchjob,
    trainjob,
    indexed_job,
    volcano,
    runai,
    skypilot,
)


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    """Return what the platform says; None without a platform."""
    found = (platform.detect(environ, read_file) for platform in PLATFORMS)
    return next((each for each in found if each is not None), None)
