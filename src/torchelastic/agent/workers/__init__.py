"""Agent process: the worker processes of a node, from start to exit.

pool             starts, talks to and stops the workers of this node
worker_record    the facts about one worker
supervisor       the processes of one generation: start, exit, SIGTERM and SIGKILL
environment      the environment variables of a worker; numa: its CPUs
oom              whether a worker ran out of memory, and the sentence about it
handed_memory    steps of scripts, counted by their optimizers, and metrics that workers report
"""
