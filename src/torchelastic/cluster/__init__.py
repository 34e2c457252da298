"""Any process: where a job runs: which scheduler started it, and notices of the cloud.

detect            finds the platform that started this process
platform          the facts that a platform hands to a node
slurm, kubeflow, indexed_job, volcano, runai, skypilot, ray_driver, torchx_replica
                  one platform each
job_directory     the directory of a submitted job, on storage that its nodes share
preemption        notices that this machine or pod will be taken away
operator/         the controller of ElasticJobs on Kubernetes
submit/           turns a job into what a scheduler takes
"""
