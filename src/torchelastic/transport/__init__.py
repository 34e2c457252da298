"""Agent process: connections between agents: frames, authentication, TLS, addresses.

frames            messages as length-prefixed JSON; codec: dataclasses as checked JSON
link              one connection; tls encrypts it
connect           the client side: connect, greet and authenticate
listener          the server side, an agent's one port; limits: which strangers to drop, pure
auth              the proof of the job's secret, pure; credentials: where secret and keys come from
addresses         binds and resolves addresses; interfaces: those of this machine; own_endpoint
ring              connections between neighbours, which notice a lost agent at once
splice            connects workers that look for torch's store at the agent's port to it
http, http_socket the HTTP of the metrics server and the dashboard
http_client       HTTP requests to etcd and to metadata servers
"""
