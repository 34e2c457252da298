"""The component that TorchX runs a job with: `torchx run torchelastic.torchx:elastic`.

TorchX reads this file on the machine that submits: it imports neither torch nor the agent.
TorchX 0.7 executes its text inside a module of its own, and accepts no newer spelling of types.
"""

from pathlib import Path
from typing import Dict, List, Optional

from torchx import IMAGE, specs
from torchx.components.structured_arg import StructuredNameArgument

from torchelastic.cluster.platform import JOB_DIR
from torchelastic.cluster.torchx_replica import ENDPOINT, REPLICA
from torchelastic.config import DEFAULT_PORT, parse_shape


def elastic(
    *script_args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    j: str = "1x1",
    image: str = IMAGE,
    name: str = "/",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    rdzv_port: int = DEFAULT_PORT,
    job_dir: str = "",
) -> specs.AppDef:
    """
    Elastic, fault-tolerant training: one torchelastic agent per replica.

    Args:
        script_args: arguments of the script or module
        script: script to run within the image
        m: module to run instead of a script
        j: [MIN:]NODESxWORKERS, such as 2x8 or 2:4x8
        image: image (e.g. docker)
        name: name of the job: EXPERIMENT/RUN, EXPERIMENT/, /RUN or RUN; the script's by default
        h: a registered named resource, instead of cpu, gpu and memMB
        cpu: CPUs per replica
        gpu: GPUs per replica
        memMB: memory per replica in MB
        env: environment variables (e.g. A=1,B=2); PET_* variables are the flags of torchelastic run
        mounts: mounts, as for dist.ddp (e.g. type=volume,src=CLAIM,dst=/shared)
        max_retries: how often the scheduler starts a lost replica again
        rdzv_port: port at which the replicas meet
        job_dir: directory on storage that all replicas share; each job keeps its secret in a new
            directory there. Not needed with local_cwd, slurm and lsf
    """
    if (script is None) == (m is None):
        raise ValueError("Give either --script or -m.")
    least, most, _ = parse_shape(j)
    named = StructuredNameArgument.parse_from(name=name, m=m, script=script)
    variables = {
        **(env or {}),
        ENDPOINT: f"{specs.macros.rank0_env}:{rdzv_port}",
        REPLICA: specs.macros.replica_id,
        "TORCHX_TRACKING_EXPERIMENT_NAME": named.experiment_name,
    }
    if job_dir:
        variables[JOB_DIR] = f"{job_dir}/{specs.macros.app_id}"
    target = ["-m", m] if m else [script or ""]
    role_name = m.rpartition(".")[2] if m else Path(script or "").stem
    role = specs.Role(
        # For a name with a dash TorchX expects another variable than Volcano sets.
        name=role_name.replace("-", "_"),
        image=image,
        entrypoint="torchelastic",
        args=["run", "-j", j, *target, *script_args],
        env=variables,
        num_replicas=most,
        min_replicas=least,
        max_retries=max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        port_map={"rendezvous": rdzv_port},
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=named.run_name, roles=[role])


def get_file_contents(name: str) -> Optional[str]:
    """Return the source of this module for its own name, which TorchX 0.7 takes for that of a file.

    An entry point of the group `torchx.file`. For other names it does what TorchX does without it:
    return a file that comes with TorchX, or None.
    """
    import torchx

    own = name == "torchelastic.torchx"
    path = Path(__file__) if own else Path(torchx.__file__).parents[1] / name
    return path.read_text() if path.is_file() else None
