"""A module name of 0.2's."""

from torch.distributed.elastic.utils.api import get_env_variable_or_raise

__all__ = ["get_env_variable_or_raise"]
