"""Launching process: start jobs and processes from Python: `elastic_launch`."""

from torchelastic.config import LaunchConfig
from torchelastic.launcher.launch_job import elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
