"""What a job is to be: the data the command line or a Python caller makes, and its parsers.

Nothing here reads the environment, touches the disk or starts anything.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchelastic.errors import ConfigError

DEFAULT_PORT = 29400
DEFAULT_STATIC_PORT = 29500
DEFAULT_ETCD_PORT = 2379
#: The endpoint of an etcd that the only node of a job is to start for itself.
OWN_ETCD = "localhost:0"
#: The page of a job is where it usually is, or at a free port.
PAGE_ANYWHERE = "auto"
#: Three names of one rendezvous: it speaks etcd's v3 API whichever is used.
ETCD_BACKENDS = ("etcd", "etcd-v2", "etcd-v3")
DEFAULT_SHUTDOWN_TIMEOUT = 30.0
DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
# The words torch takes.
_TRUTH = {
    **dict.fromkeys(("1", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "f", "false", "n", "no"), False),
}


class Std(enum.IntFlag):
    """Which of a worker's two output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """`"3"` for every local rank, `"0:1,11:3"` for some.

        >>> Std.from_str("0:1,11:3") == {0: Std.OUT, 11: Std.ALL}
        True
        """
        if re.fullmatch(r"[0-3]", text):
            return cls(int(text))
        if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            pairs = (item.split(":") for item in text.split(","))
            return {int(rank): cls(int(mask)) for rank, mask in pairs}
        raise ConfigError(
            f"'{text}' does not name output streams: write 0, 1 (stdout), 2 (stderr) or 3 (both), "
            "or one per local rank as in 0:1,1:3."
        )


@dataclass(frozen=True)
class Grow:
    """When newcomers may come into a running world (`--grow`)."""

    when: Literal["any", "every", "after-checkpoint"] = "any"
    seconds: float = 0.0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Grow:
        """`any`, `every:SECONDS` or `after-checkpoint:PATH`."""
        kind, _, value = text.partition(":")
        if kind == "any" and not value:
            return cls()
        if kind == "every" and re.fullmatch(r"\d+(\.\d+)?", value) and float(value) > 0:
            return cls("every", seconds=float(value))
        if kind == "after-checkpoint" and value:
            return cls("after-checkpoint", path=value)
        raise ConfigError(
            f"'{text}' does not say when to grow: write any, every:SECONDS or "
            "after-checkpoint:PATH."
        )

    def __str__(self) -> str:
        if self.when == "every":
            return f"every:{self.seconds:g}"
        if self.when == "after-checkpoint":
            return f"after-checkpoint:{self.path}"
        return "any"


@dataclass(frozen=True)
class WorldSizes:
    """How many workers a world may have (`--world-sizes`); empty means any number."""

    allowed: tuple[int, ...] = ()
    multiple: int = 1

    @classmethod
    def parse(cls, text: str) -> WorldSizes:
        """`1,2,4,8` or `multiple:K`."""
        if match := re.fullmatch(r"multiple:(\d+)", text):
            if int(match[1]) > 0:
                return cls(multiple=int(match[1]))
        elif re.fullmatch(r"\d+(,\d+)*", text):
            sizes = tuple(sorted({int(size) for size in text.split(",")}))
            if sizes[0] > 0:
                return cls(allowed=sizes)
        raise ConfigError(
            f"'{text}' does not say which numbers of workers are allowed: list them as in 1,2,4,8, "
            "or write multiple:K."
        )

    def allows(self, workers: int) -> bool:
        """Whether a world may have this many workers."""
        return workers in self.allowed if self.allowed else workers % self.multiple == 0

    def __str__(self) -> str:
        if self.allowed:
            return ",".join(map(str, self.allowed))
        return f"multiple:{self.multiple}"


@dataclass(frozen=True)
class Entry:
    """What a worker runs."""

    kind: Literal["script", "module", "program", "function"]
    #: A path, a module name, a program, or (function) the path of a pickled call.
    target: str
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.target


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """A job as one node sees it. The field names torch's `LaunchConfig` has mean the same here."""

    min_nodes: int = field(default=1, kw_only=False)
    max_nodes: int = field(default=1, kw_only=False)
    nproc_per_node: int = field(default=1, kw_only=False)
    #: The job's id. Empty: the launcher takes `default_run_id`.
    run_id: str = ""
    role: str = "default"

    #: `c10d` is the embedded rendezvous; `static` the same with `node_rank` for the order; `etcd`
    #: (also `etcd-v2`, `etcd-v3`) is at an etcd server.
    rdzv_backend: str = "c10d"
    #: `host:port` once made (a missing port is filled in, port 0 means private); empty: a private
    #: rendezvous on this machine, for a single node only.
    rdzv_endpoint: str = ""
    #: Every `key=value` of `--rdzv-conf`, as given; those with a meaning have set a field as well.
    rdzv_configs: Mapping[str, str] = field(default_factory=dict)
    #: The file that has the job's secret, the same on every node; None: it is in the environment,
    #: or there is none. The secret itself is nowhere in a config.
    rdzv_secret_file: str | None = None
    #: PEM files for TLS between the nodes, all three or none.
    rdzv_tls_cert: str | None = None
    rdzv_tls_key: str | None = None
    rdzv_tls_ca: str | None = None
    #: The place in a static rendezvous.
    node_rank: int | None = None
    local_addr: str | None = None

    #: Restarts the whole job may spend; refilled by progress.
    max_restarts: int = 100
    #: Membership changes spend the budget too.
    count_resizes: bool = False
    #: Seconds without a newcomer after which a world between min and max is complete.
    settle: float = 1.0
    #: Seconds of silence after which a node counts as failed.
    lease: float = 3.0
    #: Who may go on without nodes that cannot be reached; `none`: whoever is with the host.
    quorum: Literal["majority", "none"] = "majority"
    #: Of two nodes the one that does not host may go on when the host refuses connections.
    two_node_takeover: bool = False
    #: A directory on shared storage, or the URL of an object store, that has one more vote where
    #: the nodes of a world are an even number; empty: there is none.
    witness: str = ""
    #: Seconds to wait below `min_nodes`; 0 waits for ever.
    wait_for_nodes: float = 3600.0
    grow: Grow = field(default_factory=Grow)
    world_sizes: WorldSizes = field(default_factory=WorldSizes)
    #: A shell command that has to succeed on a node before it takes part; empty: none.
    preflight: str = ""

    #: Seconds a step of a resident worker may take before it counts as hanging; 0: any time; None:
    #: learned from the steps before.
    progress_timeout: float | None = None
    #: A worker that takes so many times as long as usual for its own part of a step is a straggler;
    #: 0: none is looked for. Whether its node then gives its place to a spare one.
    straggler_threshold: float = 1.5
    replace_stragglers: bool = False

    #: Other nodes that hold a copy of this node's snapshots, and bytes per second that copying may
    #: take; 0: any.
    snapshot_replicas: int = 1
    snapshot_bandwidth: float = 500e6

    zygote: bool = True
    preload: tuple[str, ...] = ()
    start_method: str = "spawn"
    virtual_local_rank: bool = False
    numa_binding: str | None = None

    #: None: a temporary directory, removed after success; `os.devnull`: no log files.
    log_dir: str | None = None
    redirects: Std | Mapping[int, Std] = Std.NONE
    tee: Std | Mapping[int, Std] = Std.NONE
    #: Output that is neither redirected nor tee'd is copied to files as well, as it is, where it
    #: does not go to a terminal.
    log_copy: bool = True
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    log_line_prefix_template: str | None = None
    event_log_handler: str = "null"
    #: `host:port` where the agent tells its metrics over HTTP; empty: nowhere.
    metrics_address: str = ""
    #: The file with what a scraper has to show; needed where other machines can reach the address.
    metrics_token_file: str | None = None
    #: `host:port` of a page that shows the job, or `auto`; empty: there is none.
    dashboard: str = ""
    #: What a browser has to show there; None: made up where other machines can reach it.
    dashboard_token_file: str | None = None

    signals_to_handle: tuple[str, ...] = DEFAULT_SIGNALS
    #: Seconds between SIGTERM and SIGKILL, on every path.
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT
    #: Kept for torch's callers; workers are watched by pidfd, nothing is polled.
    monitor_interval: float = 0.1

    #: Sentences the agent logs once at the start: flags and keys accepted without a meaning here.
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._take_torchs_forms()
        self._check_numbers()
        _ = self.is_host  # a bad word is refused here, not later by the agent
        if 0 < max(self.world_sizes.allowed, default=0) < self.min_nodes:
            raise ConfigError(
                f"--world-sizes {self.world_sizes} allows fewer workers than the job has nodes "
                f"at least ({self.min_nodes}): change it or --nnodes."
            )
        if len({bool(self.rdzv_tls_cert), bool(self.rdzv_tls_key), bool(self.rdzv_tls_ca)}) > 1:
            raise ConfigError(
                "--rdzv-tls-cert, --rdzv-tls-key and --rdzv-tls-ca belong together: give all three."
            )
        object.__setattr__(self, "rdzv_endpoint", self._canonical_endpoint())
        if self.rdzv_backend in ETCD_BACKENDS:
            self._check_etcd()
        if self.witness:
            self._check_witness()
        if self.max_nodes > 1 and not self.rdzv_endpoint:
            raise ConfigError(
                "A job of several nodes needs a place to meet: give every node the same "
                f"--rdzv-endpoint HOST:PORT (default port {DEFAULT_PORT}), a node of the job and "
                "a free port there."
            )

    def _take_torchs_forms(self) -> None:
        """torch's config has signals in one string, lists for filters and None for defaults."""
        if isinstance(self.signals_to_handle, str):
            object.__setattr__(self, "signals_to_handle", tuple(self.signals_to_handle.split(",")))
        for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if self.shutdown_timeout is None:
            object.__setattr__(self, "shutdown_timeout", DEFAULT_SHUTDOWN_TIMEOUT)

    def _check_numbers(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"min_nodes={self.min_nodes}, max_nodes={self.max_nodes} is no range of nodes: "
                "1 <= min_nodes <= max_nodes must hold."
            )
        if self.nproc_per_node < 1:
            raise ConfigError(f"nproc_per_node must be at least 1, not {self.nproc_per_node}.")
        for name in (
            *("max_restarts", "settle", "wait_for_nodes", "shutdown_timeout"),
            *("snapshot_replicas", "snapshot_bandwidth"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}.")
        if self.lease <= 0:
            raise ConfigError(f"lease must be longer than 0 seconds, not {self.lease:g}.")
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} does not fit a job of {self.max_nodes} node(s): "
                f"write 0 to {self.max_nodes - 1}, another one on every node."
            )

    def _canonical_endpoint(self) -> str:
        if not self.rdzv_endpoint:
            return ""
        endpoints = parse_endpoints(self.rdzv_endpoint, _default_port(self.rdzv_backend))
        if any(port == 0 for _, port in endpoints):
            # torch's form for "any free port on this machine": nobody else could know it.
            return OWN_ETCD if self.rdzv_backend in ETCD_BACKENDS else ""
        return ",".join(format_endpoint(host, port) for host, port in endpoints)

    def _check_etcd(self) -> None:
        if not self.rdzv_endpoint:
            raise ConfigError(
                f"--rdzv-backend {self.rdzv_backend} needs --rdzv-endpoint HOST:PORT, the address "
                f"of the etcd server (default port {DEFAULT_ETCD_PORT}; several with commas)."
            )
        if self.rdzv_endpoint == OWN_ETCD and self.max_nodes > 1:
            raise ConfigError(
                "Several nodes cannot meet at an etcd with port 0, which each would start for "
                "itself: start one, and name it in --rdzv-endpoint HOST:PORT."
            )
        # One server serves many jobs: a made-up id would bring strangers together.
        if self.max_nodes > 1 and not self.run_id:
            raise ConfigError(
                "A job of several nodes that meets at etcd needs an id: give every node the same "
                "--rdzv-id, which no other job there has."
            )

    def _check_witness(self) -> None:
        others = {
            "--quorum none": self.quorum == "none",
            "--two-node-takeover": self.two_node_takeover,
            f"--rdzv-backend {self.rdzv_backend}": self.rdzv_backend in ETCD_BACKENDS,
        }
        if given := [flag for flag, is_given in others.items() if is_given]:
            raise ConfigError(
                f"--witness and {given[0]} both say who may go on when nodes are lost: give one of "
                "them."
            )

    @property
    def is_host(self) -> bool | None:
        """Whether this node is to host the rendezvous (`--rdzv-conf is_host=1`); None: find out."""
        text = self.rdzv_configs.get("is_host")
        if text is None:
            return None
        try:
            return parse_truth(str(text))
        except ConfigError as error:
            raise ConfigError(f"--rdzv-conf is_host {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Plain data from which `from_json` makes an equal config."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        data["grow"] = str(self.grow)
        data["world_sizes"] = str(self.world_sizes)
        data["rdzv_configs"] = dict(self.rdzv_configs)
        for name in ("redirects", "tee"):
            value = data[name]
            data[name] = (
                int(value)
                if isinstance(value, Std)
                else {str(rank): int(mask) for rank, mask in value.items()}
            )
        if self.local_ranks_filter is not None:
            data["local_ranks_filter"] = sorted(self.local_ranks_filter)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LaunchConfig:
        made = dict(data)
        made["grow"] = Grow.parse(made["grow"])
        made["world_sizes"] = WorldSizes.parse(made["world_sizes"])
        for name in ("redirects", "tee"):
            value = made[name]
            made[name] = (
                Std(value)
                if isinstance(value, int)
                else {int(rank): Std(mask) for rank, mask in value.items()}
            )
        if made["local_ranks_filter"] is not None:
            made["local_ranks_filter"] = frozenset(made["local_ranks_filter"])
        for name in (
            "preload",
            "duplicate_stdout_filters",
            "duplicate_stderr_filters",
            "signals_to_handle",
            "notes",
        ):
            made[name] = tuple(made[name])
        return cls(**made)


def _default_port(backend: str) -> int:
    if backend in ETCD_BACKENDS:
        return DEFAULT_ETCD_PORT
    return DEFAULT_STATIC_PORT if backend == "static" else DEFAULT_PORT


def std_for(streams: Std | Mapping[int, Std], local_rank: int) -> Std:
    """The streams meant for one local rank."""
    if isinstance(streams, Std):
        return streams
    return streams.get(local_rank, Std.NONE)


def parse_truth(text: str) -> bool:
    """A word for yes or no, as torch reads them.

    >>> parse_truth("1"), parse_truth("False")
    (True, False)
    """
    if text.lower() not in _TRUTH:
        raise ConfigError(f"'{text}' is neither yes nor no: write 1 or 0.")
    return _TRUTH[text.lower()]


def parse_nnodes(text: str) -> tuple[int, int]:
    """`4` or `1:4`.

    >>> parse_nnodes("1:4")
    (1, 4)
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise ConfigError(
            f"'{text}' is no range of nodes: write N or MIN:MAX with 1 <= MIN <= MAX."
        )
    return int(match[1]), int(match[2] or match[1])


def parse_shape(text: str) -> tuple[int, int, int]:
    """`-j [MIN:]NODESxPROCS` as (min nodes, max nodes, workers per node).

    >>> parse_shape("1:4x8")
    (1, 4, 8)
    """
    match = re.fullmatch(r"(?:(\d+):)?(\d+)x(\d+)", text)
    if not match or not 1 <= int(match[1] or match[2]) <= int(match[2]) or int(match[3]) < 1:
        raise ConfigError(f"'{text}' is no shape: write [MIN:]NODESxPROCS as in 2x8 or 1:4x8.")
    return int(match[1] or match[2]), int(match[2]), int(match[3])


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]:port` as (host, port).

    >>> parse_endpoint("[::1]:80"), parse_endpoint("node1")
    (('::1', 80), ('node1', 29400))
    """
    match = re.fullmatch(r"(?:\[([^\],]+)\]|([^:,\s]+))(?::(\d{1,5}))?", text.strip())
    if not match or int(match[3] or 0) > 65535:
        raise ConfigError(
            f"'{text}' is no endpoint: write HOST[:PORT] as in node1:29400, an IPv6 address in "
            "brackets as in [fd00::1]:29400."
        )
    return match[1] or match[2], int(match[3]) if match[3] else default_port


def parse_endpoints(text: str, default_port: int = DEFAULT_PORT) -> tuple[tuple[str, int], ...]:
    """One endpoint or several with commas, each as `parse_endpoint` has it, and each once.

    >>> parse_endpoints("node1:80,[::1]")
    (('node1', 80), ('::1', 29400))
    """
    # Each once: a majority of them is counted when a job begins.
    return tuple(dict.fromkeys(parse_endpoint(part, default_port) for part in text.split(",")))


def format_endpoint(host: str, port: int) -> str:
    """The text `parse_endpoint` reads back.

    >>> format_endpoint("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def default_run_id(max_nodes: int, endpoint: str) -> str:
    """The id of a job whose user gave none.

    A job of one node gets one of its own. Nodes that must meet need the same, and know in common
    only the endpoint; of that, the port alone, since the host may be `localhost` to one of them
    and a name or an address to the others.
    """
    if max_nodes == 1:
        return f"job-{secrets.token_hex(4)}"
    return f"job-{parse_endpoints(endpoint)[0][1]}"
