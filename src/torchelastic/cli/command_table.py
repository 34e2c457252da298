"""Every command with its flags: the parser, the help, shell completion and the docs read this.

To add a command: its name and summary in `cli.COMMANDS`, its `Command` here, and its code in
`commands/NAME.py`: `main(parsed)`, or for a command of two words, such as `rendezvous serve`, a
function with the name of the second. That file is imported only to run the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torchelastic.cli.flags import FLAGS
from torchelastic.config import DEFAULT_PORT, PAGE_ANYWHERE, PAGE_PORT, values
from torchelastic.config.flag import HELP, Flag


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of a command, and its help."""

    #: As users write it: `torchelastic status`.
    prog: str
    about: str
    #: Besides those of a launch, if it `launches`.
    own_flags: tuple[Flag, ...] = ()
    #: Takes the flags of `run`, their PET_ variables, and a script with its arguments.
    launches: bool = False
    #: For a command that launches: refused without a script.
    needs_script: bool = True
    #: Placeholders for the words that a command takes if it does not launch, in brackets if they
    #: are optional; empty: none.
    argument: str = ""
    argument_help: str = ""
    #: The file in `commands` with its code, if that has another name.
    file: str = ""
    #: Defaults of flags that differ from those of `torchelastic run`.
    defaults: Mapping[str, str] = field(default_factory=dict)
    #: The last paragraphs of the help.
    epilog: str = ""

    @property
    def flags(self) -> tuple[Flag, ...]:
        launch = FLAGS if self.launches else ()
        return (*launch, *self.own_flags, HELP)

    @property
    def usage(self) -> str:
        words = self.argument
        if self.launches:
            words = "SCRIPT [arguments]" if self.needs_script else "[SCRIPT [arguments]]"
        return f"{self.prog} [flags] {words}".rstrip()

    @property
    def code(self) -> str:
        """`FILE.FUNCTION` of `cli.commands`."""
        if self.launches and not self.own_flags:
            return "run.main"
        first, _, second = self.prog.removeprefix("torchelastic ").partition(" ")
        return f"{self.file}.{first}" if self.file else f"{first}.{second or 'main'}"

    def default(self, flag: Flag) -> str:
        """Return the default of a flag, as text."""
        return self.defaults.get(flag.dest, flag.default)


#: A flag with a text.
_value = partial(Flag, convert=values.text, default="")
_JSON = Flag(name="--json", help="Print JSON.")
_ON_KUBERNETES = " kubernetes:[NAMESPACE/]NAME asks the cluster about its pods."


def _about_a_job(
    name: str,
    about: str,
    *flags: Flag,
    default: str = "the running job, or else the last one",
    more: str = "",
) -> Command:
    """Return a command about one job: it takes JOB and --job."""
    which = _value(
        name="--job",
        metavar="ID",
        convert=values.optional_text,
        help="Which job, if JOB is a directory with several.",
    )
    return Command(
        prog=f"torchelastic {name}",
        about=about,
        own_flags=(which, *flags),
        argument="[JOB]",
        argument_help="A job id, the beginning of one, or the --log-dir of a run "
        f"(default: {default}).{more}",
    )


RUN = Command(
    prog="torchelastic run",
    about="Run a script in every worker of an elastic job.",
    launches=True,
)
#: The two module entry points share the flags of `run`, with defaults of their own.
DISTRIBUTED_RUN = Command(
    prog="python -m torchelastic.distributed.run",
    about="The same as `torchelastic run`, with the defaults of Bagua's launcher.",
    launches=True,
    defaults={
        "nproc_per_node": "auto",
        "rdzv_backend": "static",
        "max_restarts": "3",
        "monitor_interval": "5",
    },
)
DISTRIBUTED_LAUNCH = Command(
    prog="python -m torchelastic.distributed.launch",
    about="The same as `torchelastic run`, with the defaults of torchelastic 0.2: several nodes "
    "meet at an etcd server unless another rendezvous is given.",
    launches=True,
    defaults={
        "nproc_per_node": "auto",
        "rdzv_backend": "etcd",
        "max_restarts": "3",
        "monitor_interval": "5",
    },
)
LAUNCHERS = (RUN, DISTRIBUTED_RUN, DISTRIBUTED_LAUNCH)

DOCTOR = Command(
    prog="torchelastic doctor",
    needs_script=False,
    about="Check this machine, and a launch with these flags, before a long run.",
    launches=True,
    own_flags=(
        Flag(
            name="--gpu",
            help="Also run small jobs on this machine's GPUs (CUDA in a forked worker, an NCCL "
            "all-reduce, its abort, torchelastic.train with a killed and a hung rank, a snapshot) "
            "and write a report to attach to an issue.",
        ),
        Flag(name="--json", help="Print the findings as JSON."),
    ),
    epilog="Each check is ok, a warning, a fault, or not checked. The exit code is 0 without a "
    "fault, 1 with one, and 64 if the arguments are wrong or --gpu is given on a machine without "
    "a GPU.\n"
    "Example: torchelastic doctor --nnodes 2 --rdzv-endpoint node1:29400 train.py",
)

STATUS = _about_a_job(
    "status",
    "Show the jobs of this machine: nodes, generation, workers, step, goodput, the cost of the "
    "last failure, and the last change and its cause.",
    _JSON,
    default="all jobs of this machine",
    more=_ON_KUBERNETES,
)
TOP = _about_a_job(
    "top",
    "Watch a job: its nodes and ranks, their step and speed, the latest events, and the cost of "
    "failures. Ends with the job, or with Ctrl-C.",
    Flag(name="--once", help="Print once and exit."),
)
DASHBOARD = _about_a_job(
    "dashboard",
    "Serve a web page that shows a running or ended job. Stop it with Ctrl-C.",
    _value(
        name="--address",
        metavar="[HOST:]PORT",
        convert=values.page,
        default=PAGE_ANYWHERE,
        default_words=f"{PAGE_PORT}, or a free port",
        help="Where to listen; loopback only if HOST is omitted.",
    ),
    _value(
        name="--token-file",
        metavar="FILE",
        convert=values.optional_text,
        default_words="generated unless HOST is loopback",
        help="File with the token that a browser must send to open the page.",
    ),
)
EVENTS = _about_a_job(
    "events",
    "Print the events of a job in order of time, from all event logs of its agents on this "
    "machine.",
    Flag(name="--follow", short="-f", help="Print new events until the job ends."),
    Flag(name="--json", help="Print the JSON lines of the log."),
    Flag(name="--all", help="Include the progress of workers."),
)
LOGS = _about_a_job(
    "logs",
    "Print the output of a job's workers, from its log files on this machine.",
    _value(
        name="--rank",
        metavar="RANKS",
        convert=values.optional(values.ranks),
        default_words="all",
        help="Show only these ranks, such as 0,2-3.",
    ),
    _value(
        name="--generation",
        metavar="N",
        convert=values.optional(values.whole),
        default_words="the last one",
        help="Show the ranks of this generation.",
    ),
    Flag(name="--follow", short="-f", help="Print new output until the job ends."),
    _value(
        name="--lines",
        metavar="N",
        short="-n",
        convert=values.optional(values.whole),
        default_words="all",
        help="Show the last N lines of each file.",
    ),
    Flag(name="--raw", help="Print the bytes unchanged, without prefixes."),
    more=_ON_KUBERNETES,
)
STACKS = _about_a_job(
    "stacks",
    "Show the step, last collective and current stack of each rank of a running job. Ranks with "
    "the same stack are shown together. An agent on this machine asks all others; training "
    "continues.",
    _value(
        name="--rank",
        metavar="N",
        convert=values.optional(values.whole),
        default_words="all",
        help="Show only this rank.",
    ),
    _JSON,
)
SKIPPED = _about_a_job(
    "skipped",
    "Print the samples of the steps that a job left out because of bad numbers, as JSON lines: id, "
    "epoch, step, rank, whether the rank's own numbers were bad (origin), and what was done.",
)
TRACE = _about_a_job(
    "trace",
    "Export a job as a trace: one track per rank, with generations, steps and recoveries. Open "
    "the file at ui.perfetto.dev or chrome://tracing.",
    _value(
        name="--output", metavar="FILE", short="-o", default="trace.json", help="File to write."
    ),
)


#: Of every `submit` command.
_JOB_DIR = _value(
    name="--job-dir",
    metavar="DIR",
    convert=values.optional_text,
    default_words="torchelastic-jobs/SCRIPT-RANDOM",
    help="New directory for the job's secret, output and result, on storage that all nodes share.",
)
_DRY_RUN = Flag(name="--dry-run", help="Print what would be submitted, and submit nothing.")

RENDEZVOUS_SERVE = Command(
    prog="torchelastic rendezvous serve",
    about="Host the rendezvous of jobs on a machine that does not train, such as a login node, or "
    "in a sidecar. Start it before the agents, and give them its address as --rdzv-endpoint.",
    own_flags=(
        _value(
            name="--endpoint",
            metavar="HOST[:PORT]",
            default=f"0.0.0.0:{DEFAULT_PORT}",
            help="Where to listen: a loopback name or address listens on loopback only, any other "
            "on all addresses of this machine; port 0 picks a free port.",
        ),
        _value(
            name="--rdzv-id",
            metavar="ID",
            default_words="any job, each separate from the others",
            help="Serve only this job.",
        ),
        _value(
            name="--state-file",
            metavar="FILE",
            convert=values.optional_text,
            help="File that keeps the state: after a restart with it, jobs continue.",
        ),
        _value(
            name="--rdzv-secret-file",
            metavar="FILE",
            convert=values.optional_text,
            help="File with the secret of the jobs.",
        ),
        _value(
            name="--rdzv-tls-cert",
            metavar="FILE",
            convert=values.optional_text,
            help="Certificate of this server (PEM).",
        ),
        _value(
            name="--rdzv-tls-key",
            metavar="FILE",
            convert=values.optional_text,
            help="Private key of that certificate (PEM, not encrypted).",
        ),
        _value(
            name="--rdzv-tls-ca",
            metavar="FILE",
            convert=values.optional_text,
            help="CA certificate (PEM) that signed all certificates.",
        ),
    ),
)

SUBMIT_SLURM = Command(
    prog="torchelastic submit slurm",
    about="Submit a job to Slurm that survives lost nodes, and that is queued again when it is "
    "preempted and before its time limit.",
    launches=True,
    own_flags=(
        _value(
            name="--time",
            metavar="TIME",
            default_words="that of the partition",
            help="Time limit of each start, as sbatch takes it.",
        ),
        _value(name="--partition", metavar="NAME", default_words="Slurm's", help="Partition."),
        Flag(
            name="--array",
            help="Submit a job array of MAX tasks, each one node, which join and leave as Slurm "
            "gives and takes them, instead of one job.",
        ),
        _value(
            name="--notice",
            metavar="SECONDS",
            convert=values.whole,
            default="120",
            help="How long before the time limit the nodes are told to save and leave.",
        ),
        _value(
            name="--sbatch-option",
            metavar="OPTION",
            convert=values.texts,
            repeated=True,
            help="Option of sbatch, as in --sbatch-option=--gpus-per-node=8. Can be repeated.",
        ),
        _JOB_DIR,
        _DRY_RUN,
    ),
    epilog="Example: torchelastic submit slurm --nnodes 2:4 --nproc-per-node 8 --time 4:00:00 -- "
    "train.py --epochs 90",
)

SUBMIT_RAY = Command(
    prog="torchelastic submit ray",
    about="Run a job on the nodes of a Ray cluster, and wait for its end.",
    launches=True,
    own_flags=(
        _value(
            name="--address",
            metavar="ADDRESS",
            default="auto",
            default_words="RAY_ADDRESS, or the cluster of this machine",
            help="Address of the Ray cluster.",
        ),
        _value(
            name="--num-cpus",
            metavar="N",
            convert=values.optional(values.amount),
            default_words="one per worker, unless other resources are given",
            help="CPUs that Ray reserves on each node.",
        ),
        _value(
            name="--num-gpus",
            metavar="N",
            convert=values.optional(values.amount),
            default_words="none",
            help="GPUs that Ray reserves on each node; also the default of --nproc-per-node.",
        ),
        _value(
            name="--resources",
            metavar="JSON",
            convert=values.resources,
            default="{}",
            default_words="none",
            help="Other resources that Ray reserves on each node, as for `ray start`.",
        ),
    ),
    epilog="Flags about the rendezvous are refused: this command chooses it. The exit code is 0 "
    "only if the training is complete.\n"
    "Example: ray job submit --working-dir . -- torchelastic submit ray --nnodes 2:4 --num-gpus 8 "
    "train.py",
)

SUBMIT_RUNAI = Command(
    prog="torchelastic submit runai",
    about="Submit a job to Run:ai with its command line, `runai`. The image must have torchelastic "
    "and the script in it.",
    launches=True,
    own_flags=(
        _value(name="--image", metavar="IMAGE", help="Container image. Required."),
        _value(
            name="--name",
            metavar="NAME",
            default_words="the script's",
            help="Name of the workload.",
        ),
        _value(
            name="--project", metavar="NAME", default_words="Run:ai's", help="Project of Run:ai."
        ),
        _value(name="--gpus", metavar="N", default_words="none", help="GPUs of each node."),
        _value(
            name="--environment",
            metavar="NAME=VALUE",
            convert=values.texts,
            repeated=True,
            help="Environment variable of the containers. Can be repeated.",
        ),
        _value(
            name="--port",
            metavar="PORT",
            convert=values.texts,
            repeated=True,
            help="Port to expose, as in service-type=NodePort,container=8080. Can be repeated.",
        ),
        Flag(name="--run-as-user", help="Run the containers as you, not as root."),
        _value(
            name="--runai-option",
            metavar="OPTION",
            convert=values.texts,
            repeated=True,
            help="Option of runai, as in --runai-option=--large-shm. Can be repeated.",
        ),
        Flag(name="--legacy-cli", help="Use the CLI before 2.17: `runai submit-dist pytorch`."),
        _value(
            name="--job-dir",
            metavar="DIR",
            convert=values.optional_text,
            default_words="none: the job has no secret unless --rdzv-secret-file names one",
            help="Directory in the containers, on a volume that they share, for the job's secret "
            "and result.",
        ),
        _DRY_RUN,
    ),
    epilog="Example: torchelastic submit runai --image registry/train:1 --nnodes 2:4 --gpus 8 "
    "--nproc-per-node 8 -- train.py",
)

#: Of `submit kubernetes --as`; `cluster.submit.job_kinds` renders them.
KUBERNETES_KINDS = ("job", "jobset", "pytorchjob", "trainjob", "volcano", "elasticjob")

SUBMIT_KUBERNETES = Command(
    prog="torchelastic submit kubernetes",
    about="Submit a job to Kubernetes 1.33 or later: MAX pods, of which MIN are enough to train. "
    "The image must have torchelastic and the script in it.",
    launches=True,
    own_flags=(
        _value(name="--image", metavar="IMAGE", help="Container image. Required."),
        _value(
            name="--name",
            metavar="NAME",
            default_words="the script's, and a random part",
            help="Name of the Job, its Service and its Secret.",
        ),
        _value(
            name="--as",
            metavar="KIND",
            convert=values.one_of(*KUBERNETES_KINDS),
            default="job",
            help=f"Kind of the job: {', '.join(KUBERNETES_KINDS)}. `job` is an Indexed Job; the "
            "others need their controller in the cluster.",
        ),
        _value(
            name="--queue",
            metavar="NAME",
            default_words="none",
            help="Queue of Kueue, or for Volcano its own, that admits the job.",
        ),
        _value(
            name="--namespace",
            metavar="NAME",
            default_words="that of the current context",
            help="Namespace of the job.",
        ),
        _value(
            name="--pod-template",
            metavar="FILE",
            convert=values.optional_text,
            default_words="none",
            help="YAML of a pod that is merged into the job's: resources, volumes, node "
            "selectors and so on. The job's container is named torchelastic.",
        ),
        _DRY_RUN,
        _value(
            name="--output",
            metavar="yaml|json",
            short="-o",
            convert=values.one_of("yaml", "json"),
            default="yaml",
            help="Format of --dry-run.",
        ),
    ),
    epilog="Example: torchelastic submit kubernetes --image registry/train:1 --nnodes 2:4 "
    "--nproc-per-node 8 --pod-template gpus.yaml -- train.py",
)
SCALE = Command(
    prog="torchelastic scale",
    file="kubernetes",
    about="Change the number of nodes of a job on Kubernetes, between MIN and MAX of its --nnodes.",
    argument="JOB N",
    argument_help="The job, as kubernetes:[NAMESPACE/]NAME, and its new number of nodes.",
    epilog="Example: torchelastic scale kubernetes:train 4",
)
DELETE = Command(
    prog="torchelastic delete",
    file="kubernetes",
    about="End a job on Kubernetes and remove it. Its nodes get their grace period to leave.",
    argument="JOB",
    argument_help="The job, as kubernetes:[NAMESPACE/]NAME.",
)

OPERATOR = Command(
    prog="torchelastic operator",
    file="kubernetes",
    about="Run the controller of ElasticJobs, the Kubernetes resource of torchelastic 0.2. "
    "deploy/kubernetes in the repository runs this command in a Deployment. Outside of a pod, it "
    "uses the cluster of KUBECONFIG.",
)

#: By name, in the order of the help.
BY_NAME = {
    command.prog.removeprefix("torchelastic "): command
    for command in (
        RUN,
        STATUS,
        TOP,
        DASHBOARD,
        EVENTS,
        LOGS,
        STACKS,
        SKIPPED,
        TRACE,
        DOCTOR,
        SUBMIT_SLURM,
        SUBMIT_RAY,
        SUBMIT_RUNAI,
        SUBMIT_KUBERNETES,
        SCALE,
        DELETE,
        OPERATOR,
        RENDEZVOUS_SERVE,
    )
}
