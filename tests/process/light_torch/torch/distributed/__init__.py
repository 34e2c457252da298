"""A store that listens, so that its port is taken; nobody asks it anything."""

import socket
from typing import Any


class TCPStore:
    def __init__(self, host_name: str, port: int, **_: Any) -> None:
        self._listener = socket.create_server((host_name, port))
        self.port = self._listener.getsockname()[1]
