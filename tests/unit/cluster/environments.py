"""The environments that platforms give to a node, each with its source."""

#: Every pod, by the kubelet (Kubernetes 1.31).
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}

#: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; printed by a step of Debian's slurm-wlm 22.05.8.
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
#: The script of sbatch itself, before any srun.
SLURM_BATCH = {
    name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")
} | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
#: A shell of `salloc`: with LaunchParameters=use_interactive_step it is a step with a terminal.
SLURM_SHELL = SLURM | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PTY_PORT": "35407",
}

#: kubeflow/training-operator release-1.9, pkg/controller.v1/pytorch/{envvar,elastic}.go.
PYTORCHJOB = POD | {
    "PYTHONUNBUFFERED": "1",
    "HOSTNAME": "imagenet-worker-1",
    "PET_RDZV_ENDPOINT": "imagenet-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:3",
    "PET_NPROC_PER_NODE": "2",
    "PET_MAX_RESTARTS": "100",
    "PET_STANDALONE": "",
}
#: The same without an elasticPolicy, with a master.
PYTORCHJOB_FIXED = POD | {
    "PYTHONUNBUFFERED": "1",
    "HOSTNAME": "imagenet-worker-0",
    "MASTER_ADDR": "imagenet-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "imagenet-master-0",
    "PET_MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "1",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
}
#: run-ai/docs v2.20: a distributed training is a PyTorchJob with these in every pod.
RUNAI_DISTRIBUTED = PYTORCHJOB | {
    "JOB_NAME": "imagenet",
    "JOB_UUID": "3e1b7a3c-52fb-4f4c-9c5a-7a1d1a6e6a10",
    "RUNAI_NUM_OF_GPUS": "1",
    "NODE_NAME": "gpu-7",
}
#: run-ai/docs v2.20: a training or a notebook of one pod.
RUNAI = POD | {
    "JOB_NAME": "imagenet",
    "JOB_UUID": "3e1b7a3c-52fb-4f4c-9c5a-7a1d1a6e6a10",
    "RUNAI_NUM_OF_GPUS": "1",
    "NODE_NAME": "gpu-7",
}

#: kubeflow/trainer v2.3.0, pkg/runtime/framework/plugins/torch/torch.go, and JobSet's index.
TRAINJOB = POD | {
    "HOSTNAME": "imagenet-node-0-1",
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "imagenet-node-0-0.imagenet",
    "PET_MASTER_PORT": "29500",
}

#: Kubernetes 1.31, docs/concepts/workloads/controllers/job.md; JOB_UID and POD_UID are ours, by the
#: downward API (docs/guides/platforms.md).
INDEXED_JOB = POD | {"HOSTNAME": "imagenet-2", "JOB_COMPLETION_INDEX": "2"}
INDEXED_JOB_WITH_IDS = INDEXED_JOB | {"JOB_UID": "8f7d", "POD_UID": "c0de"}
#: As the kubelet writes it for a pod with a subdomain.
HOSTS = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
10.244.1.7\timagenet-2.workers.default.svc.cluster.local\timagenet-2
"""

#: volcano-sh/volcano 2026-08-20, pkg/controllers/job/plugins: env, svc and pytorch.
VOLCANO = POD | {
    "HOSTNAME": "imagenet-worker-0",
    "VC_TASK_INDEX": "0",
    "VK_TASK_INDEX": "0",
    "VC_MASTER_HOSTS": "imagenet-master-0.imagenet",
    "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "imagenet-worker-0.imagenet,imagenet-worker-1.imagenet",
    "VC_WORKER_NUM": "2",
    "MASTER_ADDR": "imagenet-master-0.imagenet",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "1",
}
VOLCANO_WITHOUT_PYTORCH = POD | {
    "HOSTNAME": "imagenet-worker-0",
    "VC_TASK_INDEX": "0",
    "VC_WORKER_HOSTS": "imagenet-worker-0.imagenet,imagenet-worker-1.imagenet",
    "VC_WORKER_NUM": "2",
}

#: skypilot 2026-08-22, docs "Environment variables" of a task.
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-08-22-10-00-00-000000_cluster_1",
}

#: torchx 0.7.0: runner/api.py sets TORCHX_JOB_ID, schedulers/*.py that with the host of replica 0;
#: the others are those of our component. Printed by a replica of local_cwd.
TORCHX_LOCAL = {
    "TORCHX_JOB_ID": "local_cwd://torchx/train-q69j66rtsv053",
    "TORCHX_RANK0_HOST": "localhost",
    "TORCHELASTIC_TORCHX_ENDPOINT": "TORCHX_RANK0_HOST:29400",
    "TORCHELASTIC_TORCHX_REPLICA": "1",
}
#: Slurm, schedulers/slurm_scheduler.py: each replica is a component of a heterogeneous job.
TORCHX_SLURM = SLURM | {
    "TORCHX_JOB_ID": "slurm://torchx/1234",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "TORCHELASTIC_TORCHX_ENDPOINT": "SLURM_JOB_NODELIST_HET_GROUP_0:29400",
    "TORCHELASTIC_TORCHX_REPLICA": "2",
}
#: Volcano, schedulers/kubernetes_scheduler.py: replica 0 is told another variable than the others.
TORCHX_VOLCANO = POD | {
    "TORCHX_JOB_ID": "kubernetes://torchx/train-vmp2",
    "HOSTNAME": "train-vmp2-train-1-0",
    "VC_TRAIN_0_HOSTS": "train-vmp2-train-0-0.train-vmp2",
    "VC_TRAIN_1_HOSTS": "train-vmp2-train-1-0.train-vmp2",
    "VC_TASK_INDEX": "0",
    "TORCHELASTIC_TORCHX_ENDPOINT": "VC_TRAIN_0_HOSTS:29400",
    "TORCHELASTIC_TORCHX_REPLICA": "1",
}
TORCHX_VOLCANO_0 = TORCHX_VOLCANO | {
    "HOSTNAME": "train-vmp2-train-0-0",
    "TORCHX_RANK0_HOST": "localhost",
    "TORCHELASTIC_TORCHX_ENDPOINT": "TORCHX_RANK0_HOST:29400",
    "TORCHELASTIC_TORCHX_REPLICA": "0",
}

#: ray 2.60, dashboard/modules/job/job_supervisor.py. Printed by a job of `ray job submit`.
RAY_JOB = {
    "RAY_ADDRESS": "10.0.0.1:6379",
    "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {}, "metadata": '
    '{"job_name": "raysubmit_1a2b", "job_submission_id": "raysubmit_1a2b"}}',
    "PYTHONUNBUFFERED": "1",
}
