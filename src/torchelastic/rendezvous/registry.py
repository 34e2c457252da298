"""A module name of 0.2's."""

from torchelastic.compat.rendezvous_api import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
