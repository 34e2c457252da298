"""The job as one node sees it: every setting is a field with its flag (`flag.setting`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchelastic.config import values
from torchelastic.config.flag import (
    COMPATIBILITY,
    ELASTICITY,
    LOGS,
    RENDEZVOUS,
    SHAPE,
    WORKERS,
    setting,
)
from torchelastic.config.values import (
    DEFAULT_ETCD_PORT,
    DEFAULT_PORT,
    DEFAULT_STATIC_PORT,
    ETCD_BACKENDS,
    OWN_ETCD,
    PAGE_ANYWHERE,
    PAGE_PORT,
    WITNESS_SCHEMES,
    Grow,
    Std,
    WorldSizes,
    format_endpoint,
    parse_endpoint,
    parse_endpoints,
    parse_preemption,
    parse_truth,
)
from torchelastic.errors import ConfigError


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
    """A job as one node sees it. Fields that torch's `LaunchConfig` has too mean the same.

    Fields with a flag are in the order of the help. A comment says what the field means where that
    is not what the help of the flag says. Fields without a flag are set by torchelastic, or decided
    by several flags (`cli.flags`).
    """

    #: The job runs with at least this many nodes.
    min_nodes: int = field(default=1, kw_only=False)
    #: And with at most this many; more nodes are spares.
    max_nodes: int = field(default=1, kw_only=False)
    #: Workers on this node; nodes may differ.
    nproc_per_node: int = field(default=1, kw_only=False)
    role: str = setting(
        "--role",
        group=SHAPE,
        metavar="NAME",
        convert=values.text,
        default="default",
        torchrun=True,
        help="Role of this node's workers.",
    )

    #: Normalized to `host:port` (a missing port is filled in, port 0 means private). Empty: a
    #: private rendezvous on this machine, for a single node only.
    rdzv_endpoint: str = setting(
        "--rdzv-endpoint",
        group=RENDEZVOUS,
        metavar="HOST[:PORT]",
        convert=values.endpoint,
        default="",
        default_words="private, one node only",
        torchrun=True,
        help="Where the nodes meet: one node of the job and a free port on it, the same on every "
        "node, or a comma-separated list of nodes. With etcd, its servers. The port defaults to "
        "29400 (static: 29500, etcd: 2379); port 0 means private.",
    )
    #: The job id. Empty: the launcher uses `default_run_id`.
    run_id: str = setting(
        "--rdzv-id",
        group=RENDEZVOUS,
        metavar="ID",
        convert=values.text,
        default="none",
        value="",
        default_words="generated; job-PORT with several nodes",
        torchrun=True,
        help="Job id, the same on every node.",
    )
    #: `c10d`: the embedded rendezvous. `static`: the same, ordered by `node_rank`. `etcd` (also
    #: `etcd-v2`, `etcd-v3`): an etcd server.
    rdzv_backend: str = setting(
        "--rdzv-backend",
        group=RENDEZVOUS,
        metavar="NAME",
        convert=values.text,
        default="c10d",
        torchrun=True,
        help="c10d: hosted by one of the agents, nothing to install. static: the same, but "
        "--node-rank sets the order of the nodes; selected automatically if --node-rank is given, "
        "or --master-addr or --master-port without --rdzv-endpoint. etcd (also etcd-v2, etcd-v3): "
        "an etcd server, version 3.4 or later.",
    )
    #: Every `key=value` of `--rdzv-conf`, as given; known keys have also set a field.
    rdzv_configs: Mapping[str, str] = setting(
        "--rdzv-conf",
        group=RENDEZVOUS,
        metavar="KEY=VALUE,...",
        convert=values.key_values,
        default="",
        torchrun=True,
        help="torchrun's settings: last_call_timeout sets --settle, keep_alive_interval times "
        "keep_alive_max_attempt sets --lease, join_timeout (or timeout) sets --wait-for-nodes; "
        "the flag wins. is_host (1 or 0) sets whether this node hosts the rendezvous. "
        "own_endpoint names the endpoint of this node, where several nodes share an address. "
        "secret_file, tls_cert, tls_key and tls_ca set the --rdzv flags of the same name. With "
        "etcd: protocol, cacert, cert, key and the etcd_ keys. Other keys are logged and ignored.",
    )
    #: File with the job's secret, the same on every node. None: the secret is in the environment,
    #: or there is none. A config never holds the secret itself.
    rdzv_secret_file: str | None = setting(
        "--rdzv-secret-file",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="TORCHELASTIC_SECRET, if set",
        help="File with the job's secret, the same on every node. Connections without the secret "
        "are rejected. Create one with `openssl rand -hex 32`.",
    )
    #: Certificate of this node (PEM) for TLS between the nodes. Set all three of these, or none.
    rdzv_tls_cert: str | None = setting(
        "--rdzv-tls-cert",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="Certificate of this node (PEM). With it, the nodes use mutual TLS. For TLS to etcd, "
        "use --rdzv-conf.",
    )
    rdzv_tls_key: str | None = setting(
        "--rdzv-tls-key",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="Private key of that certificate (PEM, not encrypted).",
    )
    rdzv_tls_ca: str | None = setting(
        "--rdzv-tls-ca",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="CA certificate (PEM) that signed the nodes' certificates.",
    )
    node_rank: int | None = setting(
        "--node-rank",
        group=RENDEZVOUS,
        metavar="N",
        convert=values.whole,
        value=None,
        torchrun=True,
        help="Rank of this node in a static rendezvous.",
    )
    local_addr: str | None = setting(
        "--local-addr",
        group=RENDEZVOUS,
        metavar="HOST",
        convert=values.optional_text,
        default="",
        default_words="detected",
        torchrun=True,
        help="Address at which the other nodes reach this one.",
    )
    #: Identifies this start of this node, if the platform tells: only an agent with the same one
    #: resumes the node's vote.
    incarnation: str = ""
    #: A scheduler gave the job its id: a node that starts after the end does not start it again.
    scheduled: bool = False
    #: Directory that `torchelastic submit` made for the job on storage that all nodes share; empty:
    #: there is none.
    job_dir: str = ""

    max_restarts: int = setting(
        "--max-restarts",
        group=ELASTICITY,
        metavar="N",
        convert=values.whole,
        default="100",
        torchrun=True,
        help="Restarts that the whole job may use; progress refills this budget.",
    )
    count_resizes: bool = setting(
        "--count-resizes",
        group=ELASTICITY,
        help="Count nodes that join and leave as restarts, too.",
    )
    settle: float = setting(
        "--settle",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="1",
        help="With at least MIN but fewer than MAX nodes, start once no node has joined for this "
        "long.",
    )
    lease: float = setting(
        "--lease",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.positive_seconds,
        default="3",
        help="Treat a node as failed when it is silent for this long. An agent that dies is "
        "noticed at once.",
    )
    quorum: Literal["majority", "none"] = setting(
        "--quorum",
        group=ELASTICITY,
        metavar="RULE",
        convert=values.quorum,
        default="majority",
        shared=True,
        help="Which nodes may continue when others are unreachable and no etcd decides: majority "
        "(of the nodes that trained last; of two, the rendezvous host), or none (all nodes that "
        "reach the host; a network partition can then split the job into two).",
    )
    two_node_takeover: bool = setting(
        "--two-node-takeover",
        group=ELASTICITY,
        shared=True,
        help="With two nodes, let the other node continue when the rendezvous host refuses "
        "connections. This assumes that the host is dead, which a firewall can fake.",
    )
    witness: str = setting(
        "--witness",
        group=ELASTICITY,
        metavar="URL",
        convert=values.text,
        default="",
        shared=True,
        help="Directory on storage that all nodes share, or an object store with conditional "
        "writes (s3://…), that decides which nodes continue when half of them are lost. With it, "
        "either of two nodes can die.",
    )
    preemption: str = setting(
        "--preemption",
        group=ELASTICITY,
        metavar="SOURCE",
        convert=values.preemption,
        default="auto",
        help="Which preemption notices to watch: aws, gcp, azure, kubernetes, file=PATH, none, or "
        "auto (those of the cloud or pod that this machine is). On a notice this node leaves the "
        "job at the next step. A URL replaces a source's usual address: aws=URL. Separate several "
        "sources with commas.",
    )
    wait_for_nodes: float = setting(
        "--wait-for-nodes",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="3600",
        help="How long to wait with fewer than MIN nodes before giving up; 0 waits forever.",
    )
    snapshot_replicas: int = setting(
        "--snapshot-replicas",
        group=ELASTICITY,
        metavar="N",
        convert=values.whole,
        default="1",
        help="How many other nodes keep a copy of this node's snapshots. With 0, a lost node's "
        "snapshots are lost.",
    )
    #: Limit for these copies in bytes per second; 0: none.
    snapshot_bandwidth: float = setting(
        "--snapshot-bandwidth",
        group=ELASTICITY,
        metavar="RATE",
        convert=values.rate,
        default="500M",
        help="Limit for copying snapshots to other nodes, in bytes per second, such as 200M or "
        "2G; 0 means no limit. Restoring a snapshot is never limited.",
    )
    #: Seconds after which a worker counts as hung in a step; 0: no limit; None: learned from its
    #: earlier steps.
    progress_timeout: float | None = setting(
        "--progress-timeout",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.progress_timeout,
        default="auto",
        help="Replace a worker whose step takes longer than this, in torchelastic.train and in "
        "scripts that commit: a time, off, or auto (ten times its longest step, at least ten "
        "minutes; in scripts, only for frozen workers).",
    )
    straggler_threshold: float = setting(
        "--straggler-threshold",
        group=ELASTICITY,
        metavar="FACTOR",
        convert=values.factor,
        default="1.5",
        help="Report a worker whose own part of a step takes this many times as long as is usual "
        "among all workers, with the time it costs them; 0 turns this off.",
    )
    replace_stragglers: bool = setting(
        "--replace-stragglers",
        group=ELASTICITY,
        help="Replace a node that has a straggler with a spare node, if there is one.",
    )
    grow: Grow = setting(
        "--grow",
        group=ELASTICITY,
        metavar="WHEN",
        convert=Grow.parse,
        default="any",
        shared=True,
        help="When new nodes may join: any (at any time), every:SECONDS (at most once in that "
        "time), after-checkpoint:PATH (after PATH has changed). Joining restarts workers that are "
        "not inside torchelastic.train.",
    )
    world_sizes: WorldSizes = setting(
        "--world-sizes",
        group=ELASTICITY,
        metavar="LIST",
        convert=WorldSizes.parse,
        default="multiple:1",
        shared=True,
        help="Allowed numbers of workers (WORLD_SIZE), such as 8,16,32 or multiple:8. The job "
        "runs with the largest allowed number; the remaining nodes are spares.",
    )
    #: The number of workers that hold one copy of a sharded model between them; 0: the mesh of the
    #: script says it, and a replica lies on one node.
    replica_size: int = setting(
        "--replica-size",
        group=ELASTICITY,
        metavar="N",
        convert=values.whole,
        default_words="the mesh of the script",
        help="Workers that hold one copy of a sharded model between them, as in torchelastic.mesh. "
        "Needed when a replica spans nodes: then N is a multiple of --nproc-per-node, which is the "
        "same on every node. Worlds have whole replicas only; the remaining nodes are spares.",
    )
    preflight: str = setting(
        "--preflight",
        group=ELASTICITY,
        metavar="COMMAND",
        convert=values.text,
        default="",
        help="Shell command to run on each node before it joins, such as a GPU check. While it "
        "fails, or takes longer than 5 minutes, the job continues without the node.",
    )

    preload: tuple[str, ...] = setting(
        "--preload",
        group=WORKERS,
        metavar="MODULE,...",
        convert=values.modules,
        default="",
        repeated=True,
        help="Modules to import once per node, before workers are forked. Can be repeated.",
    )
    #: Fork workers from a warm process, instead of starting each as a new Python process.
    zygote: bool = setting(
        "--no-zygote",
        group=WORKERS,
        value=True,
        help="Start each worker as a new Python process instead of forking a warm one.",
    )
    start_method: str = setting(
        "--start-method",
        group=WORKERS,
        metavar="METHOD",
        convert=values.one_of("spawn", "fork", "forkserver"),
        default="spawn",
        torchrun=True,
        help="How to start a Python function as a worker: spawn, fork or forkserver. Scripts do "
        "not use this.",
    )
    virtual_local_rank: bool = setting(
        "--virtual-local-rank",
        group=WORKERS,
        torchrun=True,
        help="Give every worker LOCAL_RANK=0 and show it only its own GPU.",
    )
    numa_binding: str | None = setting(
        "--numa-binding",
        group=WORKERS,
        metavar="MODE",
        convert=values.optional(values.one_of("node", "socket", "exclusive", "core-complex")),
        default="",
        default_words="none",
        torchrun=True,
        pet=False,
        help="Bind workers to the CPUs near their GPU: node, socket, exclusive or core-complex.",
    )
    signals_to_handle: tuple[str, ...] = setting(
        "--signals-to-handle",
        group=WORKERS,
        metavar="NAMES",
        convert=values.signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        torchrun=True,
        help="Signals that make this node leave the job. The agent first passes them to its "
        "workers.",
    )
    #: Those that the scheduler sends to every process of this node, workers included.
    shared_signals: tuple[str, ...] = ()
    #: Seconds between SIGTERM and SIGKILL, whenever workers are stopped.
    shutdown_timeout: float = setting(
        "--shutdown-timeout",
        group=WORKERS,
        metavar="SECONDS",
        convert=values.seconds,
        default="30",
        torchrun=True,
        also_read="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        help="Time between SIGTERM and SIGKILL when a worker is stopped.",
    )

    #: Directory for log files. None: a temporary one, removed after success; `os.devnull`: no log
    #: files.
    log_dir: str | None = setting(
        "--log-dir",
        group=LOGS,
        metavar="DIR",
        convert=values.optional_text,
        default="",
        default_words="a temporary directory",
        torchrun=True,
        help="Directory for log files, with subdirectories per job, generation and rank. "
        "/dev/null: no log files.",
    )
    redirects: Std | Mapping[int, Std] = setting(
        "--redirects",
        short="-r",
        group=LOGS,
        metavar="STREAMS",
        convert=Std.from_str,
        torchrun=True,
        help="Write output to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; "
        "or per local rank, such as 0:1,1:3.",
    )
    tee: Std | Mapping[int, Std] = setting(
        "--tee",
        short="-t",
        group=LOGS,
        metavar="STREAMS",
        convert=Std.from_str,
        torchrun=True,
        help="Write output to files and to the console; takes the same values as --redirects.",
    )
    log_line_prefix_template: str | None = setting(
        "--log-line-prefix-template",
        group=LOGS,
        metavar="TEXT",
        convert=values.optional_text,
        default="",
        default_words="[${role_name}${local_rank}]:",
        torchrun=True,
        also_read="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        help="Prefix of every line that --tee writes to the console; ${role_name}, ${local_rank}, "
        "${rank} and ${hostname} are replaced.",
    )
    #: Also copy output to files, unchanged, if it is neither redirected nor teed and does not go to
    #: a terminal.
    log_copy: bool = setting(
        "--no-log-copy",
        group=LOGS,
        value=True,
        help="Keep no copy of the output in files. By default, without --redirects and --tee, "
        "output that does not go to a terminal is also copied to files, at most 64 to 128 MiB per "
        "stream.",
    )
    local_ranks_filter: frozenset[int] | None = setting(
        "--local-ranks-filter",
        group=LOGS,
        metavar="RANKS",
        convert=values.local_ranks,
        default="",
        default_words="all",
        torchrun=True,
        help="Show only the output of these local ranks on the console, such as 0,1.",
    )
    duplicate_stdout_filters: tuple[str, ...] = setting(
        "--duplicate-stdout-filters",
        group=LOGS,
        metavar="WORDS",
        convert=values.words,
        default="",
        default_words="none",
        torchrun=True,
        help="Also copy lines of teed stdout that contain one of these comma-separated words to "
        "one file per node (write `,,` for a comma).",
    )
    duplicate_stderr_filters: tuple[str, ...] = setting(
        "--duplicate-stderr-filters",
        group=LOGS,
        metavar="WORDS",
        convert=values.words,
        default="",
        default_words="none",
        torchrun=True,
        help="The same for stderr.",
    )
    event_log_handler: str = setting(
        "--event-log-handler",
        group=LOGS,
        metavar="NAME",
        convert=values.text,
        default="null",
        torchrun=True,
        help="Where to send events in addition to the event log: null, console, a registered "
        "name, or PACKAGE.MODULE:NAME of your own handler.",
    )
    #: `host:port` where the agent serves its metrics over HTTP; empty: nowhere.
    metrics_address: str = setting(
        "--metrics-address",
        group=LOGS,
        metavar="[HOST:]PORT",
        convert=values.listening,
        default="",
        default_words="none",
        help="Serve Prometheus metrics at [HOST:]PORT (loopback only if HOST is omitted).",
    )
    metrics_token_file: str | None = setting(
        "--metrics-token-file",
        group=LOGS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="none",
        help="File with the bearer token that scrapers must send; required unless HOST is "
        "loopback.",
    )
    #: Port where the agent answers health probes, on all addresses of this machine; None: nowhere.
    health_port: int | None = setting(
        "--health-port",
        group=LOGS,
        metavar="PORT",
        convert=values.port,
        default="",
        default_words="none",
        help="Answer health probes at this port: /livez, and /readyz (in the current generation).",
    )
    #: `host:port` of the dashboard, or `auto`; empty: no dashboard.
    dashboard: str = setting(
        "--dashboard",
        group=LOGS,
        metavar="[[HOST:]PORT]",
        convert=values.page,
        default="",
        default_words="none",
        alone=PAGE_ANYWHERE,
        looks=values.PAGE,
        help="Serve a web page that shows the job (loopback only if HOST is omitted; port "
        f"{PAGE_PORT}, or a free one, if PORT is omitted or auto).",
    )
    dashboard_token_file: str | None = setting(
        "--dashboard-token-file",
        group=LOGS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="generated unless HOST is loopback",
        help="File with the token that a browser must send to open the page.",
    )

    #: Not used, kept for torch's callers: workers are watched by pidfd, not polled.
    monitor_interval: float = setting(
        "--monitor-interval",
        group=COMPATIBILITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="0.1",
        torchrun=True,
        help="Accepted, but not needed: workers are watched, not polled.",
    )

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
            object.__setattr__(self, "shutdown_timeout", LaunchConfig.shutdown_timeout)

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
        for one in dataclasses.fields(cls):
            if isinstance(one.default, tuple):
                made[one.name] = tuple(made[one.name])
        return cls(**made)


def _default_port(backend: str) -> int:
    if backend in ETCD_BACKENDS:
        return DEFAULT_ETCD_PORT
    return DEFAULT_STATIC_PORT if backend == "static" else DEFAULT_PORT


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
