"""A module name of 0.2's."""

from torch.distributed.elastic.multiprocessing.tail_log import TailLog, tail_logfile

__all__ = ["TailLog", "tail_logfile"]
