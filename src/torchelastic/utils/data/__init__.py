"""Worker process: data for an elastic world, with the names of 0.1."""

from torchelastic.compat.release01.data_utilities import CyclingIterator, ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
