"""The facts that a scheduler hands to a node of a job. Pure.

Each platform has a `detect(environ, read_file)` that returns `PlatformFacts`, or None
if this process was not started by that platform, or only stands in one of its shells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: The text of a file; None if it does not exist or cannot be read.
ReadFile = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class PlatformFacts:
    """The facts that a platform states; an empty value: it does not state it.

    `sources` has, by the name of the field, the variable or file of every value; empty ones are
    left out.
    """

    #: Name of the platform, as its users write it.
    platform: str
    #: The job in the platform's words, such as `job 1234`.
    job: str = ""
    run_id: str = ""
    min_nodes: int | None = None
    max_nodes: int | None = None
    #: In the order in which nodes are to try them.
    endpoints: tuple[str, ...] = ()
    #: Identifies this start of this node: not an index, which a replacement inherits.
    node: str = ""
    #: Signals that announce that the node is taken away.
    leave_signals: tuple[str, ...] = ("SIGTERM",)
    #: They reach every process of a node, workers included, not only the agent.
    signals_all: bool = False
    #: Seconds from the first of them to the end; None: unknown.
    grace: float | None = None
    #: Directory of the job, on storage that its nodes share: see `job_directory`.
    job_dir: str = ""
    #: A sentence for a user who seems to expect more of the platform.
    advice: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {name: source for name, source in self.sources.items() if source}
        object.__setattr__(self, "sources", known)


#: Names the directory of a submitted job on its nodes, see `job_directory`.
JOB_DIR = "TORCHELASTIC_JOB_DIR"
#: Kubernetes waits this long after SIGTERM unless a pod says otherwise.
POD_GRACE = 30.0


def in_pod(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in a Kubernetes pod."""
    return bool(environ.get("KUBERNETES_SERVICE_HOST"))


def pod_grace(environ: Mapping[str, str]) -> float:
    """Return the seconds from SIGTERM to SIGKILL. No variable of Kubernetes has them:
    POD_GRACE_SECONDS is for pods whose `terminationGracePeriodSeconds` is set."""
    return float(whole(environ.get("POD_GRACE_SECONDS")) or POD_GRACE)


def first_set(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Return the value and the name of the first of these variables that is set.

    >>> first_set({"B": "2", "C": "3"}, "A", "B", "C")
    ('2', 'B')
    """
    name = next((name for name in names if environ.get(name)), "")
    return environ.get(name, ""), name


def whole(text: str | None) -> int | None:
    """Return a number of nodes, None if the text is not one."""
    return int(text) if text and text.isascii() and text.isdigit() and int(text) else None
