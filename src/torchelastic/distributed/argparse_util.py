"""A module name of 0.2's."""

from torch.distributed.argparse_util import check_env, env

__all__ = ["check_env", "env"]
