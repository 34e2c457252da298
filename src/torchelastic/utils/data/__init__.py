"""Worker process: data for an elastic world, with the names of 0.1."""

from torchelastic.compat.data_utilities import CyclingIterator, ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
