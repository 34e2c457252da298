"""A module name of 0.2's."""

from torchelastic.compat.old_names import __getattr__  # noqa: F401
from torchelastic.rendezvous.etcd.local_server import EtcdServer

__all__ = ["EtcdServer"]
