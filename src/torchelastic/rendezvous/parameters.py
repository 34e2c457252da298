"""A module name of 0.1's."""

from torchelastic.compat.release01.rendezvous_parameters import RendezvousParameters, get_rendezvous

__all__ = ["RendezvousParameters", "get_rendezvous"]
