"""How the nodes of a job agree on a world."""

from torchelastic.rendezvous.parameters import RendezvousParameters

__all__ = ["RendezvousParameters"]
