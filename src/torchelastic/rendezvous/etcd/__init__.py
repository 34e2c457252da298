"""The store at an etcd server, by the JSON form of its v3 API: no dependency, no thread.

http1.py       one HTTP/1.1 connection
messages.py    what is asked of etcd and what it answers, pure
line.py        calls and streams over connections that may break, with patience
feed.py        what a watch has told and is to tell, pure
etcd_store.py  the `Store` protocol
remains.py     what a job that has ended leaves behind, and who clears it away
"""

from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd.remains import clear_remains, start_afresh

__all__ = ["EtcdStore", "clear_remains", "start_afresh"]
