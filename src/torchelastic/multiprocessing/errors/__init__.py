"""Any process: the errors of failed processes, with the names of 0.2 and torch."""

from torchelastic.launcher.error_handler import ErrorHandler, get_error_handler, record
from torchelastic.launcher.process_failure import ChildFailedError, ProcessFailure

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
