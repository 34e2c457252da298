"""A job from Python, as torch's launcher has it: `elastic_launch(config, function)(*args)`."""

from torchelastic.config import LaunchConfig
from torchelastic.launcher.api import elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
