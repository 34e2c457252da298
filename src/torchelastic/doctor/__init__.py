"""Command line: the checks of `torchelastic doctor` before a long run.

checkup              runs all checks side by side, each with a time limit
finding              the result of a check: a verdict, a sentence, and what to do; pure
machine_rules        kernel, CPUs, memory, limits, ports, clock, disks; machine_facts reads them
network_rules        names, addresses and interfaces; network_facts reads them
timeout_rules        launch settings that contradict each other, pure
variables            environment variables that contradict the launch or do harm, pure
rendezvous_check     the endpoint: can it be bound or reached; etcd_check asks etcd
port_checks          what else the agent opens: metrics, the dashboard, event handlers
torch_check          the torch that workers get, imported in a separate process (torch_probe)
gpu_jobs             `--gpu`: real jobs on the GPUs; gpu_program is what their workers run

Only torch_probe and gpu_program import torch, each in a separate process.
"""
