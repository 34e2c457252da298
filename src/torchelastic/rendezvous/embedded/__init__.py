"""Agent process: the built-in store, hosted by one of the agents.

node            this agent as a client of the host, or as the host
server, client  the store over connections, and the `Store` protocol
table           its state: rows, revisions, leases, history; pure
own_endpoint    the endpoint of the job where this agent listens
service         the store without an agent, in its own process
state_file      the file of a store that outlives its process
election        which node hosts the store next: wins, waits or gives way; pure
ask_peers       the messages of an election, sent to many nodes
failover_state  a node's knowledge with which it can vote and become host
voter_file      a voter's state on disk
tie_breaker     the witness for a node without a host
"""

from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.server import EmbeddedServer

__all__ = ["EmbeddedServer", "EmbeddedStore"]
