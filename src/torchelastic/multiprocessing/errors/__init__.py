"""Any process: torch's errors of failed processes, with our `ChildFailedError`."""

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler as ErrorHandler
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure as ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import get_error_handler as get_error_handler
from torch.distributed.elastic.multiprocessing.errors import record as record

from torchelastic.launcher.child_failed import ChildFailedError as ChildFailedError

GlobalRank, JSON = int, dict
