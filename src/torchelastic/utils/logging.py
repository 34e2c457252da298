"""A module name of 0.2's."""

from torch.distributed.elastic.utils.logging import get_logger

__all__ = ["get_logger"]
