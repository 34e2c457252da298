"""A module name of 0.2's."""

from torchelastic.compat.old_names import __getattr__  # noqa: F401
from torchelastic.compat.rendezvous_api import EtcdRendezvous as EtcdRendezvous
from torchelastic.compat.rendezvous_api import EtcdRendezvousHandler as EtcdRendezvousHandler
from torchelastic.compat.rendezvous_api import EtcdStore as EtcdStore
from torchelastic.compat.rendezvous_api import create_rdzv_handler as create_rdzv_handler
