"""The rendezvous of a 0.2 `WorkerSpec`."""

from __future__ import annotations

from torchelastic.rendezvous.parameters import RendezvousParameters, check_backend


class AgentRendezvousHandler:
    """Says where the nodes meet; the agent of the job does the meeting."""

    def __init__(self, params: RendezvousParameters) -> None:
        check_backend(params.backend, params.config)
        self.params = params

    def get_backend(self) -> str:
        return self.params.backend

    def get_run_id(self) -> str:
        return self.params.run_id

    def shutdown(self) -> bool:
        """Nothing of the rendezvous lives outside the agent: True at once."""
        return True


def get_rendezvous_handler(params: RendezvousParameters) -> AgentRendezvousHandler:
    """The handler for a `WorkerSpec`; refuses a rendezvous this version does not have."""
    return AgentRendezvousHandler(params)
