"""Any process: the errors of failed processes, with the names of 0.2 and torch."""

from torchelastic.launcher.error_handler import ErrorHandler as ErrorHandler
from torchelastic.launcher.error_handler import get_error_handler as get_error_handler
from torchelastic.launcher.error_handler import record as record
from torchelastic.launcher.process_failure import ChildFailedError as ChildFailedError
from torchelastic.launcher.process_failure import ProcessFailure as ProcessFailure

GlobalRank, JSON = int, dict
