"""The configuration of a job, made by the command line or a Python caller, and its parsers.

Nothing here reads the environment, touches the disk or starts anything.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchelastic.errors import ConfigError

DEFAULT_PORT, DEFAULT_STATIC_PORT, DEFAULT_ETCD_PORT = 29400, 29500, 2379
#: Endpoint of an etcd that the only node of a job starts for itself.
OWN_ETCD = "localhost:0"
#: The dashboard uses its default port, or a free one.
PAGE_ANYWHERE = "auto"
#: Object stores whose fsspec drivers create a key atomically; all others look, and then write.
WITNESS_SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
#: Three names of one rendezvous, which always uses etcd's v3 API.
ETCD_BACKENDS = ("etcd", "etcd-v2", "etcd-v3")
DEFAULT_SHUTDOWN_TIMEOUT = 30.0
#: Where an agent looks for preemption notices (`--preemption`).
PREEMPTION_SOURCES = ("auto", "none", "aws", "gcp", "azure", "kubernetes", "file")
DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
# The words that torch accepts.
_TRUTH = {
    **dict.fromkeys(("1", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "f", "false", "n", "no"), False),
}


class Std(enum.IntFlag):
    """A set of a worker's two output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """Parse `"3"` (every local rank) or `"0:1,11:3"` (some).

        >>> Std.from_str("0:1,11:3") == {0: Std.OUT, 11: Std.ALL}
        True
        """
        if re.fullmatch(r"[0-3]", text):
            return cls(int(text))
        if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            pairs = (item.split(":") for item in text.split(","))
            return {int(rank): cls(int(mask)) for rank, mask in pairs}
        raise ConfigError(
            f"'{text}' is not a valid set of streams: write 0, 1 (stdout), 2 (stderr) or 3 (both), "
            "or one per local rank, such as 0:1,1:3."
        )


@dataclass(frozen=True)
class Grow:
    """The rule for new nodes that join a running world (`--grow`)."""

    when: Literal["any", "every", "after-checkpoint"] = "any"
    seconds: float = 0.0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Grow:
        """Parse `any`, `every:SECONDS` or `after-checkpoint:PATH`."""
        kind, _, value = text.partition(":")
        if kind == "any" and not value:
            return cls()
        if kind == "every" and re.fullmatch(r"\d+(\.\d+)?", value) and float(value) > 0:
            return cls("every", seconds=float(value))
        if kind == "after-checkpoint" and value:
            return cls("after-checkpoint", path=value)
        raise ConfigError(
            f"'{text}' is not valid: write any, every:SECONDS or after-checkpoint:PATH."
        )

    def __str__(self) -> str:
        if self.when == "every":
            return f"every:{self.seconds:g}"
        if self.when == "after-checkpoint":
            return f"after-checkpoint:{self.path}"
        return "any"


@dataclass(frozen=True)
class WorldSizes:
    """The allowed numbers of workers in a world (`--world-sizes`); empty means any number."""

    allowed: tuple[int, ...] = ()
    multiple: int = 1

    @classmethod
    def parse(cls, text: str) -> WorldSizes:
        """Parse `1,2,4,8` or `multiple:K`."""
        if match := re.fullmatch(r"multiple:(\d+)", text):
            if int(match[1]) > 0:
                return cls(multiple=int(match[1]))
        elif re.fullmatch(r"\d+(,\d+)*", text):
            sizes = tuple(sorted({int(size) for size in text.split(",")}))
            if sizes[0] > 0:
                return cls(allowed=sizes)
        raise ConfigError(
            f"'{text}' is not a valid set of world sizes: list them, such as 1,2,4,8, or write "
            "multiple:K."
        )

    def allows(self, workers: int) -> bool:
        """Return True if a world may have this many workers."""
        return workers in self.allowed if self.allowed else workers % self.multiple == 0

    def __str__(self) -> str:
        if self.allowed:
            return ",".join(map(str, self.allowed))
        return f"multiple:{self.multiple}"


@dataclass(frozen=True)
class Entry:
    """The script, module, program or function that a worker runs."""

    kind: Literal["script", "module", "program", "function"]
    #: A path, a module name, a program, or (function) the path of a pickled call.
    target: str
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.target


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """A job as one node sees it. Fields that torch's `LaunchConfig` has too mean the same."""

    #: The job runs with at least this many nodes.
    min_nodes: int = field(default=1, kw_only=False)
    #: And with at most this many; more nodes are spares.
    max_nodes: int = field(default=1, kw_only=False)
    #: Workers on this node; nodes may differ.
    nproc_per_node: int = field(default=1, kw_only=False)
    #: The job id. Empty: the launcher uses `default_run_id`.
    run_id: str = ""
    role: str = "default"

    #: `c10d`: the embedded rendezvous. `static`: the same, ordered by `node_rank`. `etcd` (also
    #: `etcd-v2`, `etcd-v3`): an etcd server.
    rdzv_backend: str = "c10d"
    #: Normalized to `host:port` (a missing port is filled in, port 0 means private). Empty: a
    #: private rendezvous on this machine, for a single node only.
    rdzv_endpoint: str = ""
    #: Every `key=value` of `--rdzv-conf`, as given; known keys have also set a field.
    rdzv_configs: Mapping[str, str] = field(default_factory=dict)
    #: File with the job's secret, the same on every node. None: the secret is in the environment,
    #: or there is none. A config never holds the secret itself.
    rdzv_secret_file: str | None = None
    #: Certificate of this node (PEM) for TLS between the nodes. Set all three of these, or none.
    rdzv_tls_cert: str | None = None
    rdzv_tls_key: str | None = None
    rdzv_tls_ca: str | None = None
    #: Rank of this node in a static rendezvous.
    node_rank: int | None = None
    local_addr: str | None = None
    #: Identifies this start of this node, if the platform tells: only an agent with the same one
    #: resumes the node's vote.
    incarnation: str = ""
    #: A scheduler gave the job its id: a node that starts after the end does not start it again.
    scheduled: bool = False
    #: Directory that `torchelastic submit` made for the job on storage that all nodes share; empty:
    #: there is none.
    job_dir: str = ""

    #: Restarts that the whole job may use; progress refills this budget.
    max_restarts: int = 100
    #: Count membership changes as restarts, too.
    count_resizes: bool = False
    #: With at least min but fewer than max nodes, start after this many seconds without a new node.
    settle: float = 1.0
    #: Seconds of silence after which a node counts as failed.
    lease: float = 3.0
    #: Which nodes may continue when others are unreachable; `none`: those that reach the host.
    quorum: Literal["majority", "none"] = "majority"
    #: With two nodes, the other node may continue when the rendezvous host refuses connections.
    two_node_takeover: bool = False
    #: A directory on shared storage, or the URL of an object store, that holds one more vote when
    #: a world has an even number of nodes; empty: none.
    witness: str = ""
    #: Seconds to wait with fewer than `min_nodes`; 0 waits forever.
    wait_for_nodes: float = 3600.0
    grow: Grow = field(default_factory=Grow)
    world_sizes: WorldSizes = field(default_factory=WorldSizes)
    #: The number of workers that hold one copy of a sharded model between them; 0: the mesh of the
    #: script says it, and a replica lies on one node.
    replica_size: int = 0
    #: A shell command that must succeed on a node before it joins; empty: none.
    preflight: str = ""

    #: Seconds after which a worker counts as hung in a step; 0: no limit; None: learned from its
    #: earlier steps.
    progress_timeout: float | None = None
    #: A worker is a straggler when its own part of a step takes this many times as long as usual;
    #: 0: off.
    straggler_threshold: float = 1.5
    #: A spare node replaces a node that has a straggler.
    replace_stragglers: bool = False

    #: How many other nodes keep a copy of this node's snapshots.
    snapshot_replicas: int = 1
    #: Limit for these copies in bytes per second; 0: none.
    snapshot_bandwidth: float = 500e6

    #: Fork workers from a warm process, instead of starting each as a new Python process.
    zygote: bool = True
    preload: tuple[str, ...] = ()
    start_method: str = "spawn"
    virtual_local_rank: bool = False
    numa_binding: str | None = None

    #: Directory for log files. None: a temporary one, removed after success; `os.devnull`: no log
    #: files.
    log_dir: str | None = None
    redirects: Std | Mapping[int, Std] = Std.NONE
    tee: Std | Mapping[int, Std] = Std.NONE
    #: Also copy output to files, unchanged, if it is neither redirected nor teed and does not go to
    #: a terminal.
    log_copy: bool = True
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    log_line_prefix_template: str | None = None
    event_log_handler: str = "null"
    #: `host:port` where the agent serves its metrics over HTTP; empty: nowhere.
    metrics_address: str = ""
    #: File with the bearer token that scrapers must send; required unless the host is loopback.
    metrics_token_file: str | None = None
    #: Port where the agent answers health probes, on all addresses of this machine; None: nowhere.
    health_port: int | None = None
    #: `host:port` of the dashboard, or `auto`; empty: no dashboard.
    dashboard: str = ""
    #: File with the token that browsers must send; None: generated unless the host is loopback.
    dashboard_token_file: str | None = None

    signals_to_handle: tuple[str, ...] = DEFAULT_SIGNALS
    #: Which preemption notices to watch: `KIND`, `KIND=URL` or
    #: `file=PATH`. `auto`: the cloud or pod that this machine is.
    preemption: str = "auto"
    #: Those that the scheduler sends to every process of this node, workers included.
    shared_signals: tuple[str, ...] = ()
    #: Seconds between SIGTERM and SIGKILL, whenever workers are stopped.
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT
    #: Not used, kept for torch's callers: workers are watched by pidfd, not polled.
    monitor_interval: float = 0.1

    #: Sentences that the agent logs once at the start, such as which flags and keys are ignored.
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._take_torchs_forms()
        self._check_numbers()
        parse_preemption(self.preemption)
        _ = self.is_host, self.own_endpoint  # reject a bad value here, not later in the agent
        if 0 < max(self.world_sizes.allowed, default=0) < self.min_nodes:
            raise ConfigError(
                f"--world-sizes {self.world_sizes} allows fewer workers than the job's minimum "
                f"of {self.min_nodes} nodes: change it or --nnodes."
            )
        if self.replica_size > 1:
            self._check_replicas()
        self._check_sizes()
        if len({bool(self.rdzv_tls_cert), bool(self.rdzv_tls_key), bool(self.rdzv_tls_ca)}) > 1:
            raise ConfigError(
                "--rdzv-tls-cert, --rdzv-tls-key and --rdzv-tls-ca belong together: set all three."
            )
        object.__setattr__(self, "rdzv_endpoint", self._canonical_endpoint())
        if self.rdzv_backend in ETCD_BACKENDS:
            self._check_etcd()
        if self.witness:
            self._check_witness()
        if self.max_nodes > 1 and not self.rdzv_endpoint:
            raise ConfigError(
                "A job of several nodes needs --rdzv-endpoint: give every node the same HOST:PORT, "
                f"a node of the job and a free port on it (default port {DEFAULT_PORT})."
            )

    def _take_torchs_forms(self) -> None:
        """Accept what torch's config has: signals as one string, lists, None for defaults."""
        if isinstance(self.signals_to_handle, str):
            object.__setattr__(self, "signals_to_handle", tuple(self.signals_to_handle.split(",")))
        for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if self.shutdown_timeout is None:
            object.__setattr__(self, "shutdown_timeout", DEFAULT_SHUTDOWN_TIMEOUT)

    def _check_numbers(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"min_nodes={self.min_nodes}, max_nodes={self.max_nodes} is not a valid range of "
                "nodes: use 1 <= min_nodes <= max_nodes."
            )
        if self.nproc_per_node < 1:
            raise ConfigError(f"nproc_per_node must be at least 1, not {self.nproc_per_node}.")
        for name in (
            *("max_restarts", "settle", "wait_for_nodes", "shutdown_timeout"),
            *("snapshot_replicas", "snapshot_bandwidth", "replica_size"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}.")
        if self.lease <= 0:
            raise ConfigError(f"lease must be more than 0 seconds, not {self.lease:g}.")
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} is not valid in a job of {self.max_nodes} node(s): "
                f"write 0 to {self.max_nodes - 1}, a different one on each node."
            )

    def _check_replicas(self) -> None:
        size, nproc = self.replica_size, self.nproc_per_node
        if nproc % size and size % nproc:
            raise ConfigError(
                f"--replica-size {size} is neither a divisor nor a multiple of this node's {nproc} "
                "workers: change it or --nproc-per-node."
            )
        if size > nproc * self.max_nodes:
            raise ConfigError(
                f"--replica-size {size} needs {size // nproc} nodes of {nproc} worker(s), but "
                f"--nnodes allows {self.max_nodes}: change one of them."
            )
        spanned = self.nodes_per_replica
        if -(-self.min_nodes // spanned) * spanned > self.max_nodes:
            raise ConfigError(
                f"A replica of --replica-size {size} spans {spanned} nodes, and no multiple of "
                f"that is between {self.min_nodes} and {self.max_nodes}: change --nnodes."
            )
        if any(one % size for one in self.world_sizes.allowed):
            raise ConfigError(
                f"--world-sizes {self.world_sizes} must list multiples of --replica-size {size}: a "
                "world has whole replicas only."
            )

    def _check_sizes(self) -> None:
        """Refuse sizes that no world can have. With several nodes that is not known here, because
        others may have more workers, unless a replica spans nodes: then all have as many."""
        spanned = self.nodes_per_replica
        if self.max_nodes > 1 and spanned == 1:
            return
        nodes = range(-(-self.min_nodes // spanned) * spanned, self.max_nodes + 1, spanned)
        if not any(self.world_sizes.allows(count * self.nproc_per_node) for count in nodes):
            raise ConfigError(
                f"--world-sizes {self.world_sizes} cannot be met by {self.max_nodes} node(s) of "
                f"{self.nproc_per_node} worker(s)"
                + (f" in replicas of {self.replica_size}" if spanned > 1 else "")
                + ": change --world-sizes, --nnodes or --nproc-per-node."
            )

    @property
    def nodes_per_replica(self) -> int:
        """The number of nodes that a replica of a sharded model spans."""
        return max(self.replica_size // self.nproc_per_node, 1)

    def _canonical_endpoint(self) -> str:
        if not self.rdzv_endpoint:
            return ""
        endpoints = parse_endpoints(self.rdzv_endpoint, _default_port(self.rdzv_backend))
        if any(port == 0 for _, port in endpoints):
            # torch's form for "any free port on this machine": no other node could know it.
            return OWN_ETCD if self.rdzv_backend in ETCD_BACKENDS else ""
        return ",".join(format_endpoint(host, port) for host, port in endpoints)

    def _check_etcd(self) -> None:
        if not self.rdzv_endpoint:
            raise ConfigError(
                f"--rdzv-backend {self.rdzv_backend} needs --rdzv-endpoint HOST:PORT, the address "
                f"of the etcd server (default port {DEFAULT_ETCD_PORT}; several, with commas)."
            )
        if self.rdzv_endpoint == OWN_ETCD and self.max_nodes > 1:
            raise ConfigError(
                "With port 0, each node would start its own etcd, and the nodes could not meet: "
                "start one etcd server and set --rdzv-endpoint to its HOST:PORT."
            )
        # One server serves many jobs: a default id could mix two of them.
        if self.max_nodes > 1 and not self.run_id:
            raise ConfigError(
                "A job of several nodes needs an id at etcd: give every node the same --rdzv-id, "
                "one that no other job on that server uses."
            )

    def _check_witness(self) -> None:
        others = {
            "--quorum none": self.quorum == "none",
            "--two-node-takeover": self.two_node_takeover,
            f"--rdzv-backend {self.rdzv_backend}": self.rdzv_backend in ETCD_BACKENDS,
        }
        if given := [flag for flag, is_given in others.items() if is_given]:
            raise ConfigError(
                f"--witness and {given[0]} both decide which nodes continue when others are lost: "
                "remove one of them."
            )
        scheme, is_url, _ = self.witness.partition("://")
        if is_url and scheme not in ("file", "local", *WITNESS_SCHEMES):
            raise ConfigError(
                f"--witness {self.witness}: '{scheme}' storage cannot create a key atomically. Use "
                "a directory that all nodes share, or an object store (s3://, gs://, abfs://)."
            )

    @property
    def is_host(self) -> bool | None:
        """`--rdzv-conf is_host`: this node hosts the rendezvous, or does not; None: detect it."""
        text = self.rdzv_configs.get("is_host")
        if text is None:
            return None
        try:
            return parse_truth(str(text))
        except ConfigError as error:
            raise ConfigError(f"--rdzv-conf is_host {error}") from None

    @property
    def own_endpoint(self) -> tuple[str, int] | None:
        """`--rdzv-conf own_endpoint`: the endpoint that is this node's; None: detect it."""
        text = self.rdzv_configs.get("own_endpoint")
        if text is None:
            return None
        own = parse_endpoint(str(text))
        if not self.rdzv_endpoint or own not in parse_endpoints(self.rdzv_endpoint):
            raise ConfigError(
                f"--rdzv-conf own_endpoint={text} is not one of the endpoints "
                f"({self.rdzv_endpoint or 'there are none'}): name one of them."
            )
        return own

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` builds an equal config."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        data["grow"] = str(self.grow)
        data["world_sizes"] = str(self.world_sizes)
        data["rdzv_configs"] = dict(self.rdzv_configs)
        for name in ("redirects", "tee"):
            value = data[name]
            data[name] = (
                int(value)
                if isinstance(value, int)  # torch's `Std` as well
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
            "shared_signals",
            "notes",
        ):
            made[name] = tuple(made[name])
        return cls(**made)


def _default_port(backend: str) -> int:
    if backend in ETCD_BACKENDS:
        return DEFAULT_ETCD_PORT
    return DEFAULT_STATIC_PORT if backend == "static" else DEFAULT_PORT


def std_for(streams: Std | Mapping[int, Std], local_rank: int) -> Std:
    """Return the streams of one local rank."""
    if isinstance(streams, int):  # torch's `Std` as well
        return Std(streams)
    return Std(streams.get(local_rank, Std.NONE))


def parse_truth(text: str) -> bool:
    """Parse a word for yes or no, as torch does.

    >>> parse_truth("1"), parse_truth("False")
    (True, False)
    """
    if text.lower() not in _TRUTH:
        raise ConfigError(f"'{text}' is neither yes nor no: write 1 or 0.")
    return _TRUTH[text.lower()]


def parse_preemption(text: str) -> tuple[tuple[str, str], ...]:
    """Parse `KIND`, `KIND=URL` and `file=PATH`, separated by commas, into kinds and the rest.

    >>> parse_preemption("aws,file=/run/leave")
    (('aws', ''), ('file', '/run/leave'))
    """
    return tuple(map(_preemption_source, text.split(",")))


def _preemption_source(text: str) -> tuple[str, str]:
    kind, _, where = text.partition("=")
    if kind not in PREEMPTION_SOURCES or (where and kind in ("auto", "none")):
        kinds = ", ".join(PREEMPTION_SOURCES[:-1])
        raise ConfigError(
            f"'{text}' is not a source of preemption notices: write {kinds} or file=PATH."
        )
    if kind == "file" and not where:
        raise ConfigError(f"'{text}' has no path: write file=PATH.")
    if where and kind != "file" and not where.startswith(("http://", "https://")):
        raise ConfigError(f"'{where}' is not a URL: write {kind}=http://HOST:PORT.")
    return kind, where if kind == "file" else where.rstrip("/")


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse `4` or `1:4`.

    >>> parse_nnodes("1:4")
    (1, 4)
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise ConfigError(
            f"'{text}' is not a valid range of nodes: write N or MIN:MAX with 1 <= MIN <= MAX."
        )
    return int(match[1]), int(match[2] or match[1])


def parse_shape(text: str) -> tuple[int, int, int]:
    """Parse `-j [MIN:]NODESxPROCS` into (min nodes, max nodes, workers per node).

    >>> parse_shape("1:4x8")
    (1, 4, 8)
    """
    match = re.fullmatch(r"(?:(\d+):)?(\d+)x(\d+)", text)
    if not match or not 1 <= int(match[1] or match[2]) <= int(match[2]) or int(match[3]) < 1:
        raise ConfigError(
            f"'{text}' is not a valid shape: write [MIN:]NODESxPROCS, such as 2x8 or 1:4x8."
        )
    return int(match[1] or match[2]), int(match[2]), int(match[3])


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Parse `host`, `host:port` or `[v6]:port` into (host, port).

    >>> parse_endpoint("[::1]:80"), parse_endpoint("node1")
    (('::1', 80), ('node1', 29400))
    """
    match = re.fullmatch(r"(?:\[([^\],]+)\]|([^:,\s]+))(?::(\d{1,5}))?", text.strip())
    if not match or int(match[3] or 0) > 65535:
        raise ConfigError(
            f"'{text}' is not a valid endpoint: write HOST[:PORT], such as node1:29400, with an "
            "IPv6 address in brackets, such as [fd00::1]:29400."
        )
    return match[1] or match[2], int(match[3]) if match[3] else default_port


def parse_endpoints(text: str, default_port: int = DEFAULT_PORT) -> tuple[tuple[str, int], ...]:
    """Parse comma-separated endpoints with `parse_endpoint`, without duplicates.

    >>> parse_endpoints("node1:80,[::1]")
    (('node1', 80), ('::1', 29400))
    """
    # No duplicates: a job starts with a majority of them.
    return tuple(dict.fromkeys(parse_endpoint(part, default_port) for part in text.split(",")))


def format_endpoint(host: str, port: int) -> str:
    """Return the text that `parse_endpoint` parses back.

    >>> format_endpoint("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def default_run_id(max_nodes: int, endpoint: str) -> str:
    """Return the id of a job whose user gave none.

    A job of one node gets a unique id. Several nodes need the same id and share only the endpoint.
    Of that, only the port is used: the host may be `localhost` on one node and a name or an
    address on the others.
    """
    if max_nodes == 1:
        import secrets  # slow to import, and `--help` must be fast

        return f"job-{secrets.token_hex(4)}"
    return f"job-{parse_endpoints(endpoint)[0][1]}"
