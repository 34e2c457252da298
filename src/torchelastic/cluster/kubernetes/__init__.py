"""Command line: Kubernetes clusters. No agent and no worker imports this.

cluster_api   objects of a cluster as plain data, through the official client (the extra
              `kubernetes`)
job_summary   the state of a job, from its objects; pure
job_control   submit, scale, inspect and delete jobs
"""
