"""A module name of 0.2's."""

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

__all__ = ["get_error_handler"]
