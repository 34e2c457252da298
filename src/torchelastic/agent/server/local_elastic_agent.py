"""A module name of 0.2's."""

from torchelastic.compat.release02.agent_api import LocalElasticAgent

__all__ = ["LocalElasticAgent"]
