"""What failed processes leave, and what is raised for them."""

from torchelastic.multiprocessing.errors.error_handler import (
    ErrorHandler,
    get_error_handler,
    record,
)
from torchelastic.multiprocessing.errors.process_failure import ChildFailedError, ProcessFailure

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
