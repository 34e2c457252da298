"""Agent process: connections between agents: frames, authentication, TLS, addresses.

frames            messages as length-prefixed JSON; codec: dataclasses as checked JSON
link              one connection; tls encrypts it
connect           the client side: connect, greet and authenticate
listener          the server side, an agent's one port: strangers, clients, and torch's workers
auth              the proof of the job's secret, pure; credentials: where secret and keys come from
addresses         binds and resolves addresses, and lists those of this machine
ring              connections between neighbours, which notice a lost agent at once
http, http_socket the HTTP of the metrics server and the dashboard
http_client       HTTP requests to etcd and to metadata servers
"""
