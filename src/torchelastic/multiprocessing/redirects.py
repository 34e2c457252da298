"""A module name of 0.2's."""

from torch.distributed.elastic.multiprocessing.redirects import (
    redirect,
    redirect_stderr,
    redirect_stdout,
)

__all__ = ["redirect", "redirect_stderr", "redirect_stdout"]
