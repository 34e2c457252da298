"""Any process: module names of 0.1 and 0.2."""

from torch.distributed.elastic.utils.api import get_env_variable_or_raise

__all__ = ["get_env_variable_or_raise"]
