"""A module name of 0.1's."""

from torchelastic.compat.release01.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
