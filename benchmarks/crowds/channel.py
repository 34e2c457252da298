"""What a process full of agents is told, and how it tells what came of it.

Orders are words on its standard input, a line each; events are JSON lines on its standard output.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

GO, MARK, COUNT = "go", "mark", "count"
#: Seconds of silence after which a node counts as failed. Long: two cores stand for a thousand
#: machines, each of which would have had the time to say that it lives.
LEASE = 30


@dataclass(frozen=True)
class Share:
    """The agents of one process, and the job they are part of."""

    job: str
    backend: str
    endpoint: str
    agents: int
    #: How many agents a world has at least and at most.
    least: int
    most: int
    #: The one agent of this process hosts the store.
    hosts: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_command_line(cls) -> Share:
        return cls(**json.loads(sys.argv[1]))


def tell(event: str, **facts: Any) -> None:
    """In one write: threads tell, too."""
    os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")
