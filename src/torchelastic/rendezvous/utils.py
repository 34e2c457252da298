"""A module name of 0.2's."""

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

__all__ = ["parse_rendezvous_endpoint"]
