"""Data for an elastic world, with the names of 0.1."""

from torchelastic.utils.data.cycling_iterator import CyclingIterator
from torchelastic.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
