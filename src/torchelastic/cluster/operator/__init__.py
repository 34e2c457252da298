"""Command line: the controller of ElasticJobs, the custom resource of torchelastic 0.2.

elastic_job      the spec of a job, checked, and its conditions
worker_pods      the pods of a job: their manifests, and how one has ended
reconcile        what to create, delete and report for a job, given its pods
leader_lease     which of several controllers acts
object_watch     the objects of a kind, followed by list and watch
job_controller   the loop that performs it
"""
