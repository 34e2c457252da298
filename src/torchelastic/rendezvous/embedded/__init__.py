"""Agent process: the store that needs nothing installed, hosted by one of the agents.

node            this agent as a client of the host, or as the host
server, client  the store over connections, and the `Store` protocol
table           its state: rows, revisions, leases, history; pure
service         the store without an agent, in a process of its own (server_process)
journal         what a store that outlives its process writes down, pure; state_file has the file
votes           the messages of an election; ask_peers sends them; election decides, pure
failover_state  what a node keeps so that the store survives its host
voter_file      what a node must not forget as a voter
tie_breaker     the witness, as a node without a host asks it
"""

from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.server import EmbeddedServer
from torchelastic.transport.addresses import bind_endpoint

__all__ = ["EmbeddedServer", "EmbeddedStore", "bind_endpoint"]
