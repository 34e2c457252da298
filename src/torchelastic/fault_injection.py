"""A module name of 0.1's."""

from torchelastic.compat.release01.fault_injection import start_fault_injection_thread

__all__ = ["start_fault_injection_thread"]
