"""Command line: the checks of `torchelastic doctor` before a long run.

checkup              runs all checks side by side, each with a time limit
finding              the result of a check: a verdict, a sentence, and what to do; pure
this_machine         kernel, CPUs, memory, limits, ports, clock, disks
network              names, addresses and interfaces
launch_rules         settings and variables that contradict each other or do harm; pure
endpoints            the rendezvous and etcd: can they be bound or reached; and what else the agent
                     opens: metrics, the dashboard, event handlers
torch_check          the torch that workers get, imported in a separate process (torch_probe)
gpu_jobs             `--gpu`: real jobs on the GPUs, and the report; gpu_program is what their
                     workers run
child_process        run a program with a time limit

Only torch_probe and gpu_program import torch, each in a separate process.
"""
