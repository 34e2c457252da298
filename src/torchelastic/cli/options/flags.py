"""Every flag, declared once.

The parser, the help, `docs/reference/cli.md` and the PET_* variables come from here.
"""

from __future__ import annotations

from torchelastic.cli.options import values
from torchelastic.cli.options.compat_flags import OLD_FLAGS
from torchelastic.cli.options.flag import ELASTICITY, LOGS, RENDEZVOUS, SHAPE, WORKERS, Flag
from torchelastic.config import (
    DEFAULT_SIGNALS,
    PAGE_ANYWHERE,
    Grow,
    Std,
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
        help="Nodes and workers per node in one word: 2x8, or 1:4x8 for one to four nodes.",
    ),
    Flag(
        name="--nnodes",
        group=SHAPE,
        metavar="N|MIN:MAX",
        convert=parse_nnodes,
        default="1:1",
        torchrun=True,
        help="Number of nodes, or the range the job may run with.",
    ),
    Flag(
        name="--nproc-per-node",
        group=SHAPE,
        metavar="N",
        convert=values.workers,
        default="1",
        torchrun=True,
        help="Workers on this node: a number, gpu, xpu or cpu for one per device, or auto "
        "(one per GPU, per CPU where there is no GPU). Nodes may differ.",
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
        "node, or several with commas; with etcd, its servers. The port defaults to 29400 "
        "(static: 29500, etcd: 2379); port 0 means private.",
    ),
    Flag(
        name="--rdzv-id",
        group=RENDEZVOUS,
        metavar="ID",
        convert=values.text,
        default="none",
        default_words="made up; job-PORT with several nodes",
        torchrun=True,
        help="Id of the job, the same on every node.",
    ),
    Flag(
        name="--rdzv-backend",
        group=RENDEZVOUS,
        metavar="NAME",
        convert=values.text,
        default="c10d",
        torchrun=True,
        help="c10d: hosted by an agent, nothing to install. static: the same, with the order of "
        "the nodes given by --node-rank; taken unasked when that flag is given, or --master-addr "
        "or --master-port without --rdzv-endpoint. etcd (also etcd-v2, etcd-v3): at an etcd "
        "server, 3.4 or later.",
    ),
    Flag(
        name="--rdzv-conf",
        group=RENDEZVOUS,
        metavar="KEY=VALUE,...",
        convert=values.key_values,
        default="",
        torchrun=True,
        help="torchrun's settings: last_call_timeout is --settle, keep_alive_interval times "
        "keep_alive_max_attempt is --lease, join_timeout (or timeout) is --wait-for-nodes; the "
        "flag wins. is_host says whether this node hosts; secret_file, tls_cert, tls_key and "
        "tls_ca are --rdzv-secret-file and so on. Other keys are named in the log and ignored.",
    ),
    Flag(
        name="--rdzv-secret-file",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="TORCHELASTIC_SECRET, if set",
        help="File with the secret of the job, the same on every node: whoever does not have it is "
        "kept out. Make one with `openssl rand -hex 32`.",
    ),
    Flag(
        name="--rdzv-tls-cert",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="Certificate of this node (PEM): the nodes speak TLS with each other and ask each "
        "other for certificates. For TLS to etcd see --rdzv-conf.",
    ),
    Flag(
        name="--rdzv-tls-key",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="Key of that certificate (PEM, not encrypted).",
    ),
    Flag(
        name="--rdzv-tls-ca",
        group=RENDEZVOUS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="no TLS",
        help="Certificate of the authority (PEM) that the nodes' certificates are of.",
    ),
    Flag(
        name="--standalone",
        group=RENDEZVOUS,
        torchrun=True,
        help="One node and a private rendezvous, whatever the other flags say.",
    ),
    Flag(
        name="--node-rank",
        group=RENDEZVOUS,
        metavar="N",
        convert=values.whole,
        torchrun=True,
        help="Place of this node in a static rendezvous.",
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
        default_words="found out",
        torchrun=True,
        help="Address under which the other nodes reach this one.",
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
        help="Restarts the whole job may spend; refilled by progress.",
    ),
    Flag(
        name="--count-resizes",
        group=ELASTICITY,
        help="Let nodes that come and go spend restarts too.",
    ),
    Flag(
        name="--settle",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="1",
        help="Between MIN and MAX nodes, begin after this long without a newcomer.",
    ),
    Flag(
        name="--lease",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.positive_seconds,
        default="3",
        help="A node silent for this long has failed; one that dies is noticed at once.",
    ),
    Flag(
        name="--quorum",
        group=ELASTICITY,
        metavar="RULE",
        convert=values.quorum,
        default="majority",
        help="Who may go on without nodes that cannot be reached, where no etcd decides: majority "
        "(of the nodes that trained last; of two, the host of the rendezvous), or none (whoever "
        "is with the host: a network cut in two can then have two jobs).",
    ),
    Flag(
        name="--two-node-takeover",
        group=ELASTICITY,
        help="Of two nodes, let the other one go on when the host of the rendezvous refuses "
        "connections: trusts that it is dead then, which a firewall can fake.",
    ),
    Flag(
        name="--witness",
        group=ELASTICITY,
        metavar="URL",
        convert=str,
        default="",
        help="A directory on storage that all nodes share, or an object store with conditional "
        "writes (s3://…), that decides who goes on when half of the nodes are lost: so either of "
        "two nodes may die.",
    ),
    Flag(
        name="--wait-for-nodes",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.seconds,
        default="3600",
        help="How long to wait below MIN nodes before giving up; 0 waits for ever.",
    ),
    Flag(
        name="--snapshot-replicas",
        group=ELASTICITY,
        metavar="N",
        convert=values.whole,
        default="1",
        help="Other nodes that hold a copy of what only this node's workers have committed to "
        "memory; 0: none, and a lost node's snapshots are lost.",
    ),
    Flag(
        name="--snapshot-bandwidth",
        group=ELASTICITY,
        metavar="RATE",
        convert=values.rate,
        default="500M",
        help="Bytes per second that copying snapshots to other nodes may take, as in 200M or 2G; "
        "0: any. Bringing them back is never held up.",
    ),
    Flag(
        name="--progress-timeout",
        group=ELASTICITY,
        metavar="SECONDS",
        convert=values.progress_timeout,
        default="auto",
        help="A worker whose step takes longer hangs, and is replaced, inside torchelastic.train "
        "and in scripts that commit: a time, off, or auto (ten times its longest step, ten minutes "
        "at least; in scripts for frozen workers only).",
    ),
    Flag(
        name="--straggler-threshold",
        group=ELASTICITY,
        metavar="FACTOR",
        convert=values.factor,
        default="1.5",
        help="A worker whose own part of a step takes so many times as long as is usual among all "
        "of them is named, with what it costs the others; 0: none is looked for.",
    ),
    Flag(
        name="--replace-stragglers",
        group=ELASTICITY,
        help="A node with such a worker gives its place to a spare node, if there is one.",
    ),
    Flag(
        name="--grow",
        group=ELASTICITY,
        metavar="WHEN",
        convert=Grow.parse,
        default="any",
        help="When newcomers may come in, which restarts workers that are not inside "
        "torchelastic.train: any (at any time), "
        "every:SECONDS (at most so often), after-checkpoint:PATH (after PATH has changed).",
    ),
    Flag(
        name="--world-sizes",
        group=ELASTICITY,
        metavar="LIST",
        convert=WorldSizes.parse,
        default="multiple:1",
        help="How many workers may train together (WORLD_SIZE), as in 8,16,32 or multiple:8. The "
        "largest allowed world runs; the nodes left over are spares.",
    ),
    Flag(
        name="--preflight",
        group=ELASTICITY,
        metavar="COMMAND",
        convert=values.text,
        default="",
        help="Run this in a shell on each node before it takes part, a GPU check for example. "
        "While it fails, or takes longer than 5 minutes, the job goes on without the node.",
    ),
)

_WORKER_FLAGS = (
    Flag(
        name="--module",
        short="-m",
        group=WORKERS,
        torchrun=True,
        help="SCRIPT is a module, to be run as by `python -m`.",
    ),
    Flag(
        name="--no-python",
        group=WORKERS,
        torchrun=True,
        help="SCRIPT is a program, to be run without Python.",
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
        help="Modules to import once per node, before workers are forked. May be repeated.",
    ),
    Flag(
        name="--no-zygote",
        group=WORKERS,
        help="Start every worker as a new Python instead of forking a warm one.",
    ),
    Flag(
        name="--start-method",
        group=WORKERS,
        metavar="METHOD",
        convert=values.one_of("spawn", "fork", "forkserver"),
        default="spawn",
        torchrun=True,
        help="How a Python function becomes a worker: spawn, fork or forkserver. Scripts do not "
        "need it.",
    ),
    Flag(
        name="--virtual-local-rank",
        group=WORKERS,
        torchrun=True,
        help="Every worker sees LOCAL_RANK=0 and its own GPU as the only one.",
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
        help="Signals that make this node leave, handing them to its workers first.",
    ),
    Flag(
        name="--shutdown-timeout",
        group=WORKERS,
        metavar="SECONDS",
        convert=values.seconds,
        default="30",
        torchrun=True,
        also_read="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        help="Time a worker has between SIGTERM and SIGKILL.",
    ),
)

_LOG_FLAGS = (
    Flag(
        name="--log-dir",
        group=LOGS,
        metavar="DIR",
        convert=values.optional_text,
        default="",
        default_words="a temporary one",
        torchrun=True,
        help="Where log files go, in a directory per job, generation and rank. /dev/null: none.",
    ),
    Flag(
        name="--redirects",
        short="-r",
        group=LOGS,
        metavar="STREAMS",
        convert=Std.from_str,
        torchrun=True,
        help="Write output to files instead of the console: 0 nothing, 1 stdout, 2 stderr, "
        "3 both; or by local rank, as in 0:1,1:3.",
    ),
    Flag(
        name="--tee",
        short="-t",
        group=LOGS,
        metavar="STREAMS",
        convert=Std.from_str,
        torchrun=True,
        help="Write output to files as well as the console.",
    ),
    Flag(
        name="--log-line-prefix-template",
        group=LOGS,
        metavar="TEXT",
        convert=values.optional_text,
        default="",
        default_words="[${role_name}${local_rank}]:",
        torchrun=True,
        also_read="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        help="Prefix of every line that --tee shows on the console; ${role_name}, ${local_rank}, "
        "${rank} and ${hostname} are replaced.",
    ),
    Flag(
        name="--no-log-copy",
        group=LOGS,
        help="Without --redirects and --tee, keep no copy of the output in files. One is kept, of "
        "64 to 128 MiB at most for each stream, where the output does not go to a terminal.",
    ),
    Flag(
        name="--local-ranks-filter",
        group=LOGS,
        metavar="RANKS",
        convert=values.local_ranks,
        default="",
        default_words="all",
        torchrun=True,
        help="Local ranks whose output the console shows, as in 0,1.",
    ),
    Flag(
        name="--duplicate-stdout-filters",
        group=LOGS,
        metavar="WORDS",
        convert=values.words,
        default="",
        default_words="none",
        torchrun=True,
        help="Copy lines of teed stdout that contain one of these words to one file per node "
        "(`,,` stands for a comma).",
    ),
    Flag(
        name="--duplicate-stderr-filters",
        group=LOGS,
        metavar="WORDS",
        convert=values.words,
        default="",
        default_words="none",
        torchrun=True,
        help="The same for stderr.",
    ),
    Flag(
        name="--event-log-handler",
        group=LOGS,
        metavar="NAME",
        convert=values.text,
        default="null",
        torchrun=True,
        help="Where events go besides the event log: null, console, a registered name, or "
        "PACKAGE.MODULE:NAME of a handler of your own.",
    ),
    Flag(
        name="--metrics-address",
        group=LOGS,
        metavar="[HOST:]PORT",
        convert=values.listening,
        default="",
        default_words="none",
        help="Tell Prometheus how the job does at this address; on this machine only without HOST.",
    ),
    Flag(
        name="--metrics-token-file",
        group=LOGS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="none",
        help="File with the bearer token that a scraper has to show; needed with any HOST but "
        "loopback.",
    ),
    Flag(
        name="--dashboard",
        group=LOGS,
        metavar="[[HOST:]PORT]",
        convert=values.page,
        default="",
        default_words="none",
        alone=PAGE_ANYWHERE,
        looks=values.PAGE,
        help="Show the job on a page in the browser; on this machine only without HOST, at port "
        "29480 or a free one without PORT (also: auto).",
    ),
    Flag(
        name="--dashboard-token-file",
        group=LOGS,
        metavar="FILE",
        convert=values.optional_text,
        default="",
        default_words="made up for any HOST but loopback",
        help="File with the token that a browser has to show to see the page.",
    ),
)

FLAGS: tuple[Flag, ...] = (
    *_SHAPE_FLAGS,
    *_RENDEZVOUS_FLAGS,
    *_ELASTICITY_FLAGS,
    *_WORKER_FLAGS,
    *_LOG_FLAGS,
    *OLD_FLAGS,
)
