"""Launching process: run a job on the nodes of a Ray cluster (`run`), and follow the cluster."""

from torchelastic.ray.ray_job import Result, run

__all__ = ["Result", "run"]
