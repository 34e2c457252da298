"""A module name of 0.1's."""

from torchelastic.compat.random_kills import start_fault_injection_thread

__all__ = ["start_fault_injection_thread"]
