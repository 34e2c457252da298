"""A module name of 0.2's."""

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

__all__ = ["ErrorHandler"]
