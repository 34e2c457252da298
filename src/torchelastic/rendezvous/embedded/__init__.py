"""The store that needs nothing installed: hosted by the agent that can bind the endpoint.

table.py     the state, pure: rows, revisions, leases, history
wire.py      the messages and their frames, pure
link.py      one connection that carries frames, the same at both ends; tls.py encrypts it
endpoint.py  whose machine the endpoint is on; its listening sockets
reception.py an agent's one port: greets whoever comes, hands on whom it admits
lobby.py     how many may wait there to be admitted, pure
server.py    the store over connections
serving.py   the store without an agent; process.py is the process around it
journal.py   what a store that outlives its process writes down, pure; state_file.py has the file
dial.py      getting a connection, waiting for the host
client.py    the `Store` protocol over connections that may break
endpoints.py where this agent listens
seat.py      this agent as a client of whoever hosts the store, or as its host; holding.py is what
             it keeps for that, ballots.py and canvass.py how it asks the others, poll.py, pure,
             what it makes of their answers
ring.py      connections between neighbours, where the store would notice an agent's end too late
"""

from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.endpoint import bind_endpoint
from torchelastic.rendezvous.embedded.server import EmbeddedServer

__all__ = ["EmbeddedServer", "EmbeddedStore", "bind_endpoint"]
