"""A module name of 0.2's."""

from torchelastic.compat.agent_api import LocalElasticAgent

__all__ = ["LocalElasticAgent"]
