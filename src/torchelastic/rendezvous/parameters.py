"""A module name of 0.2's."""

from torchelastic.rendezvous.backend_parameters import RendezvousParameters

__all__ = ["RendezvousParameters"]
