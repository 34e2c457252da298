"""Every flag, declared once.

The parser, the help, `docs/reference/cli.md` and the PET_* variables come from here. A new flag
also needs a field in `config` and its way there in `launch_config`.
"""

from __future__ import annotations

from torchelastic.cli.options import values
from torchelastic.cli.options.compat_flags import OLD_FLAGS
from torchelastic.cli.options.flag import ELASTICITY, RENDEZVOUS, SHAPE, WORKERS, Flag
from torchelastic.cli.options.log_flags import LOG_FLAGS
from torchelastic.config import (
    DEFAULT_SIGNALS,
    Grow,
    WorldSizes,
    parse_nnodes,
    parse_shape,
)

_SHAPE_FLAGS = (
    Flag(
        name="--shape",
        short="-j",
        group=SHAPE,
        metavar="[MIN:]NODESxPROCS",
        convert=values.optional(parse_shape),
        default="",
        help="Number of nodes and workers per node: 2x8, or 1:4x8 for one to four nodes.",
    ),
    Flag(
        name="--nnodes",
        group=SHAPE,
        metavar="N|MIN:MAX",
        convert=parse_nnodes,
        default="1:1",
        torchrun=True,
        help="Number of nodes, or the MIN:MAX range that the job can run with.",
    ),
    Flag(
        name="--nproc-per-node",
        group=SHAPE,
        metavar="N",
        convert=values.workers,
        default="1",
        torchrun=True,
        help="Workers on this node: a number; gpu, xpu or cpu for one per device; or auto (one "
        "per GPU, or one per CPU if there is no GPU). Nodes may differ.",
    ),
    Flag(
        name="--role",
        group=SHAPE,
        metavar="NAME",
        convert=values.text,
        default="default",
        torchrun=True,
        help="Role of this node's workers.",
    ),
)

_HOST_FLAGS = (
    Flag(
        name="--hosts",
        group=SHAPE,
        metavar="HOST[:N],...",
        convert=values.hosts,
        default="",
        help="Run the whole job from here: start an agent with N workers on each host, over ssh. "
        "Hosts need the same Python and the same files at the same paths. --nnodes defaults to "
        "1:HOSTS.",
    ),
    Flag(
        name="--hosts-from",
        group=SHAPE,
        metavar="FILE|COMMAND",
        convert=values.text,
        default="",
        help="The same, with the hosts from a file, or from a command that prints them: one "
        "HOST[:N] per line. It is read again every second; hosts join and leave the running job.",
    ),
)

_RENDEZVOUS_FLAGS = (
    Flag(
        name="--rdzv-endpoint",
        group=RENDEZVOUS,
        metavar="HOST[:PORT]",
        convert=values.endpoint,
        default="",
        default_words="private, one node only",
        torchrun=True,
        help="Where the nodes meet: one node of the job and a free port on it, the same on every "
        "node, or a comma-separated list of nodes. With etcd, its servers. The port defaults to "
        "29400 (static: 29500, etcd: 2379); port 0 means private.",
    ),
    Flag(
        name="--rdzv-id",
        group=RENDEZVOUS,
        metavar="ID",
        convert=values.text,
        default="none",
        default_words="generated; job-PORT with several nodes",
        torchrun=True,
        help="Job id, the same on every node.",
    ),
    Flag(
        name="--rdzv-backend",
        group=RENDEZVOUS,
        metavar="NAME",
        convert=values.text,
        default="c10d",
        torchrun=True,
        help="c10d: hosted by one of the agents, nothing to install. static: the same, but "
        "--node-rank sets the order of the nodes; selected automatically if --node-rank is given, "
        "or --master-addr or --master-port without --rdzv-endpoint. etcd (also etcd-v2, etcd-v3): "
        "an etcd server, version 3.4 or later.",
    ),
    Flag(
        name="--rdzv-conf",
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
    ),
    Flag(
        name="--rdzv-secret-file",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="TORCHELASTIC_SECRET, if set",
        help="File with the job's secret, the same on every node. Connections without the secret "
        "are rejected. Create one with `openssl rand -hex 32`.",
    ),
    Flag(
        name="--rdzv-tls-cert",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="Certificate of this node (PEM). With it, the nodes use mutual TLS. For TLS to etcd, "
        "use --rdzv-conf.",
    ),
    Flag(
        name="--rdzv-tls-key",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="Private key of that certificate (PEM, not encrypted).",
    ),
    Flag(
        name="--rdzv-tls-ca",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="CA certificate (PEM) that signed the nodes' certificates.",
    ),
    Flag(
        name="--standalone",
        group=RENDEZVOUS,
        torchrun=True,
        help="Run on one node with a private rendezvous, whatever the other flags say.",
    ),
    Flag(
        name="--node-rank",
        group=RENDEZVOUS,
        metavar="N",
        convert=values.whole,
        torchrun=True,
        help="Rank of this node in a static rendezvous.",
    ),
    Flag(
        name="--master-addr",
        group=RENDEZVOUS,
        metavar="HOST",
        convert=values.host,
        default="127.0.0.1",
        torchrun=True,
        help="Host of node 0 in a static rendezvous without --rdzv-endpoint.",
    ),
    Flag(
        name="--master-port",
        group=RENDEZVOUS,
        metavar="PORT",
        convert=values.port,
        default="",
        default_words="29500",
        torchrun=True,
        help="Port on that host.",
    ),
    Flag(
        name="--local-addr",
        group=RENDEZVOUS,
        metavar="HOST",
        convert=values.optional_text,
        default="",
        default_words="detected",
        torchrun=True,
        help="Address at which the other nodes reach this one.",
    ),
)

_ELASTICITY_FLAGS = (
    Flag(
        name="--max-restarts",
        group=ELASTICITY,
        metavar="N",
        convert=values.whole,
        default="100",
        torchrun=True,
        help="Restarts that the whole job may use; progress refills this budget.",
    ),
    Flag(
        name="--count-resizes",
        group=ELASTICITY,
        help="Count nodes that join and leave as restarts, too.",
    ),
    Flag(
        name="--settle",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="1",
        help="With at least MIN but fewer than MAX nodes, start once no node has joined for this "
        "long.",
    ),
    Flag(
        name="--lease",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.positive_seconds,
        default="3",
        help="Treat a node as failed when it is silent for this long. An agent that dies is "
        "noticed at once.",
    ),
    Flag(
        name="--quorum",
        group=ELASTICITY,
        metavar="RULE",
        convert=values.quorum,
        default="majority",
        help="Which nodes may continue when others are unreachable and no etcd decides: majority "
        "(of the nodes that trained last; of two, the rendezvous host), or none (all nodes that "
        "reach the host; a network partition can then split the job into two).",
    ),
    Flag(
        name="--two-node-takeover",
        group=ELASTICITY,
        help="With two nodes, let the other node continue when the rendezvous host refuses "
        "connections. This assumes that the host is dead, which a firewall can fake.",
    ),
    Flag(
        name="--witness",
        group=ELASTICITY,
        metavar="URL",
        convert=str,
        default="",
        help="Directory on storage that all nodes share, or an object store with conditional "
        "writes (s3://…), that decides which nodes continue when half of them are lost. With it, "
        "either of two nodes can die.",
    ),
    Flag(
        name="--preemption",
        group=ELASTICITY,
        metavar="SOURCE",
        convert=values.preemption,
        default="auto",
        help="Which preemption notices to watch: aws, gcp, azure, kubernetes, file=PATH, none, or "
        "auto (those of the cloud or pod that this machine is). On a notice this node leaves the "
        "job at the next step. A URL replaces a source's usual address: aws=URL. Separate several "
        "sources with commas.",
    ),
    Flag(
        name="--wait-for-nodes",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="3600",
        help="How long to wait with fewer than MIN nodes before giving up; 0 waits forever.",
    ),
    Flag(
        name="--snapshot-replicas",
        group=ELASTICITY,
        metavar="N",
        convert=values.whole,
        default="1",
        help="How many other nodes keep a copy of this node's snapshots. With 0, a lost node's "
        "snapshots are lost.",
    ),
    Flag(
        name="--snapshot-bandwidth",
        group=ELASTICITY,
        metavar="RATE",
        convert=values.rate,
        default="500M",
        help="Limit for copying snapshots to other nodes, in bytes per second, such as 200M or "
        "2G; 0 means no limit. Restoring a snapshot is never limited.",
    ),
    Flag(
        name="--progress-timeout",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.progress_timeout,
        default="auto",
        help="Replace a worker whose step takes longer than this, in torchelastic.train and in "
        "scripts that commit: a time, off, or auto (ten times its longest step, at least ten "
        "minutes; in scripts, only for frozen workers).",
    ),
    Flag(
        name="--straggler-threshold",
        group=ELASTICITY,
        metavar="FACTOR",
        convert=values.factor,
        default="1.5",
        help="Report a worker whose own part of a step takes this many times as long as is usual "
        "among all workers, with the time it costs them; 0 turns this off.",
    ),
    Flag(
        name="--replace-stragglers",
        group=ELASTICITY,
        help="Replace a node that has a straggler with a spare node, if there is one.",
    ),
    Flag(
        name="--grow",
        group=ELASTICITY,
        metavar="WHEN",
        convert=Grow.parse,
        default="any",
        help="When new nodes may join: any (at any time), every:SECONDS (at most once in that "
        "time), after-checkpoint:PATH (after PATH has changed). Joining restarts workers that are "
        "not inside torchelastic.train.",
    ),
    Flag(
        name="--world-sizes",
        group=ELASTICITY,
        metavar="LIST",
        convert=WorldSizes.parse,
        default="multiple:1",
        help="Allowed numbers of workers (WORLD_SIZE), such as 8,16,32 or multiple:8. The job "
        "runs with the largest allowed number; the remaining nodes are spares.",
    ),
    Flag(
        name="--replica-size",
        group=ELASTICITY,
        metavar="N",
        convert=values.whole,
        default="0",
        default_words="the mesh of the script",
        help="Workers that hold one copy of a sharded model between them, as in torchelastic.mesh. "
        "Needed when a replica spans nodes: then N is a multiple of --nproc-per-node, which is the "
        "same on every node. Worlds have whole replicas only; the remaining nodes are spares.",
    ),
    Flag(
        name="--preflight",
        group=ELASTICITY,
        metavar="COMMAND",
        convert=values.text,
        default="",
        help="Shell command to run on each node before it joins, such as a GPU check. While it "
        "fails, or takes longer than 5 minutes, the job continues without the node.",
    ),
)

_WORKER_FLAGS = (
    Flag(
        name="--module",
        short="-m",
        group=WORKERS,
        torchrun=True,
        help="SCRIPT is a module; run it like `python -m`.",
    ),
    Flag(
        name="--no-python",
        group=WORKERS,
        torchrun=True,
        help="SCRIPT is a program; run it without Python.",
    ),
    Flag(
        name="--run-path",
        group=WORKERS,
        torchrun=True,
        help="SCRIPT is a script, even with --no-python or --module.",
    ),
    Flag(
        name="--preload",
        group=WORKERS,
        metavar="MODULE,...",
        convert=values.modules,
        default="",
        repeated=True,
        help="Modules to import once per node, before workers are forked. Can be repeated.",
    ),
    Flag(
        name="--no-zygote",
        group=WORKERS,
        help="Start each worker as a new Python process instead of forking a warm one.",
    ),
    Flag(
        name="--start-method",
        group=WORKERS,
        metavar="METHOD",
        convert=values.one_of("spawn", "fork", "forkserver"),
        default="spawn",
        torchrun=True,
        help="How to start a Python function as a worker: spawn, fork or forkserver. Scripts do "
        "not use this.",
    ),
    Flag(
        name="--virtual-local-rank",
        group=WORKERS,
        torchrun=True,
        help="Give every worker LOCAL_RANK=0 and show it only its own GPU.",
    ),
    Flag(
        name="--numa-binding",
        group=WORKERS,
        metavar="MODE",
        convert=values.optional(values.one_of("node", "socket", "exclusive", "core-complex")),
        default="",
        default_words="none",
        torchrun=True,
        pet=False,
        help="Bind workers to the CPUs near their GPU: node, socket, exclusive or core-complex.",
    ),
    Flag(
        name="--signals-to-handle",
        group=WORKERS,
        metavar="NAMES",
        convert=values.signals,
        default=",".join(DEFAULT_SIGNALS),
        torchrun=True,
        help="Signals that make this node leave the job. The agent first passes them to its "
        "workers.",
    ),
    Flag(
        name="--shutdown-timeout",
        group=WORKERS,
        metavar="SECONDS",
        convert=values.seconds,
        default="30",
        torchrun=True,
        also_read="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        help="Time between SIGTERM and SIGKILL when a worker is stopped.",
    ),
)

FLAGS: tuple[Flag, ...] = (
    *_SHAPE_FLAGS,
    *_HOST_FLAGS,
    *_RENDEZVOUS_FLAGS,
    *_ELASTICITY_FLAGS,
    *_WORKER_FLAGS,
    *LOG_FLAGS,
    *OLD_FLAGS,
)
