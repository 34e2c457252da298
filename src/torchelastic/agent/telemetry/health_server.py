"""`--health-port`: answer the probes of a platform such as Kubernetes.

It listens on all addresses of the node, because a kubelet asks at the pod's. The agent's own event
loop answers, so an answer shows that it turns.
"""

from __future__ import annotations

from collections.abc import Callable

from torchelastic.agent.lifecycle.in_process import InProcessState
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.telemetry import health
from torchelastic.agent.telemetry.short_answers import Background, ShortAnswers
from torchelastic.config import LaunchConfig
from torchelastic.transport import http
from torchelastic.transport.addresses import listen_everywhere


class HealthServer:
    """Open it once; it answers until it is closed."""

    def __init__(
        self, port: int, node: str, state: Callable[[], ScriptState | InProcessState]
    ) -> None:
        self._port, self._node, self._state = port, node, state
        self._server = ShortAnswers(self._respond)

    @classmethod
    def wanted(
        cls, config: LaunchConfig, node: str, state: Callable[[], ScriptState | InProcessState]
    ) -> HealthServer | None:
        """None if it is not configured."""
        return cls(config.health_port, node, state) if config.health_port is not None else None

    async def open(self, background: Background, say: Callable[[str], None]) -> None:
        """Listen. If the port is taken, probes fail, and the platform says so."""
        try:
            listener = listen_everywhere(self._port)
        except OSError as error:
            say(f"no health probes at port {self._port}: {error.strerror or error}")
            return
        self._server.open(listener, background, "health")
        say(f"health probes at port {listener.getsockname()[1]}")

    async def close(self) -> None:
        await self._server.close()

    async def _respond(self, request: http.Request | None) -> bytes:
        state = self._state()
        leaving = bool(state.leaving) or state.is_terminal
        return health.response(request, self._node, state.world, leaving=leaving)
