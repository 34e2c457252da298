"""A module name of 0.2's."""

from torchelastic.compat.release02.local_elastic_agent import LocalElasticAgent

__all__ = ["LocalElasticAgent"]
