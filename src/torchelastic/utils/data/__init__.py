"""Worker process: data for an elastic world, with the names of 0.1."""

from torchelastic.compat.release01.cycling_iterator import CyclingIterator
from torchelastic.compat.release01.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
