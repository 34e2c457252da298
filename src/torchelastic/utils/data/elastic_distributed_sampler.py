"""A module name of 0.1's."""

from torchelastic.compat.release01.data_utilities import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
