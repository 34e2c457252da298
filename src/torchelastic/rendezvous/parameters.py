"""A module name of 0.1's."""

from torchelastic.compat.rendezvous_api import RendezvousParameters01 as RendezvousParameters
from torchelastic.compat.rendezvous_api import get_rendezvous

__all__ = ["RendezvousParameters", "get_rendezvous"]
