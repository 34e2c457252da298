"""A real Slurm cluster on one machine: every node is a host of its own (`tests.netns`).

    with SlurmCluster(3) as cluster:
        cluster.output("sbatch", "--parsable", "train.sbatch")

The first host runs munged, slurmctld and what users type; each of the others runs a slurmd. They
are Debian's slurm-wlm and munge, and everything they write is in a temporary directory.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.netns import Host, Network
from tests.support import poll_for

#: A partition that everybody uses, and one whose jobs take the nodes of the other's.
LOW, HIGH = "low", "high"
#: Seconds that a preempted job has, and those from SIGTERM to SIGKILL: a checkpoint that is written
#: by a process which first has to import torch.
GRACE_TIME, KILL_WAIT = 60, 60

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1,requeue_delay=1
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
MinJobAge=3600
SlurmdTimeout=20
ReturnToService=2
NodeName=DEFAULT CPUs={cpus} State=UNKNOWN
{nodes}
PartitionName={low} Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName={high} Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """A controller and several nodes, up when entered; nothing of them is left when exited."""

    def __init__(self, nodes: int) -> None:
        self.network = Network(nodes + 1, ipv6=False)
        # Not pytest's: paths of sockets in it must be shorter than 108 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")
        self.directory = Path(self._temporary.name)
        self.controller, *self.nodes = self.network.hosts
        #: What a user of the cluster has; sbatch hands it on to jobs.
        self.environ = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        self.network.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.network.hosts:
            host.kill()
        for process in self._processes:
            process.wait()
        self.network.__exit__(*error)
        self._temporary.cleanup()

    def _start(self) -> None:
        for name in ("state", *(f"spool-{node.name}" for node in self.nodes)):
            (self.directory / name).mkdir()
        # Named, or else slurmd looks for mounted cgroups, which are not needed.
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                controller=self.controller.name,
                address=self.controller.address,
                directory=self.directory,
                kill_wait=KILL_WAIT,
                grace=GRACE_TIME,
                low=LOW,
                high=HIGH,
                cpus=os.cpu_count(),
                nodes="\n".join(
                    f"NodeName={node.name} NodeAddr={node.address}" for node in self.nodes
                ),
            )
        )
        self._start_munge()
        self._daemon(self.controller, ["slurmctld", "-D", "-c"])
        for node in self.nodes:
            self._daemon(node, ["slurmd", "-D"])
        poll_for(lambda: self.states().count("idle") == len(self.nodes), what="idle nodes")

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = ["key-file", "socket", "pid-file", "log-file", "seed-file"]
        options = [f"--{name}={self.directory}/munge.{name.partition('-')[0]}" for name in files]
        self._daemon(self.controller, ["munged", "--foreground", "--force", *options])
        poll_for((self.directory / "munge.socket").exists, what="munged")

    def _daemon(self, host: Host, command: Sequence[str]) -> None:
        output = (self.directory / f"{command[0]}-{host.name}.out").open("wb")
        with output:
            started = host.popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(started)

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command as a user types it, on the controller."""
        return subprocess.run(
            self.controller.command(command),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    def output(self, *command: str) -> str:
        """The output of a command that succeeds."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def states(self) -> list[str]:
        """The state of every node."""
        done = self.run("sinfo", "--noheader", "--Node", "--partition", LOW, "--format=%t")
        return done.stdout.split()

    def job(self, number: str) -> dict[str, str]:
        """The output of `scontrol show job`."""
        shown = self.output("scontrol", "--oneliner", "show", "job", number)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def await_state(self, number: str, *states: str, timeout: float = 60) -> str:
        """Wait until a job has one of these states."""
        return poll_for(
            lambda: state if (state := self.job(number)["JobState"]) in states else "",
            what=f"{' or '.join(states)} of job {number}",
            timeout=timeout,
        )
