"""A module name of 0.2's."""

from torchelastic.compat.release02.etcd_rendezvous import *  # noqa: F403
