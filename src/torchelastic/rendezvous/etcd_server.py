"""A module name of 0.2's."""

from torchelastic.rendezvous.etcd.local_server import EtcdServer

__all__ = ["EtcdServer"]
