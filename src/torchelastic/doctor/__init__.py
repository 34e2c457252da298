"""Command line: the checks of `torchelastic doctor` before a long run.

checkup              runs all checks side by side, each with a time limit
finding              the result of a check: a verdict, a sentence, and what to do; pure
machine_rules        kernel, CPUs, memory, limits, ports, clock, disks; machine_facts asks for them
network_rules        names, addresses and interfaces; network_facts asks for them
timeout_rules        times and numbers of a launch that contradict each other, pure
variables            environment variables that contradict the launch or do harm, pure
rendezvous_check     the endpoint: can it be bound or reached; etcd_check asks etcd
port_checks          what else the agent opens: metrics, the dashboard, event handlers
torch_check          which torch the workers get, asked in a process of its own (torch_probe)
gpu_jobs             `--gpu`: real jobs on the GPUs; gpu_program is what their workers run

Only the two programs that run in processes of their own import torch.
"""
