"""What `torchelastic doctor` looks at before a long run.

finding.py        what a check found: a verdict, a sentence, and what to do; pure
machine.py        kernel, CPUs, memory, limits, ports, clock, disks: verdicts, pure
machine_facts.py  asks the machine for them
network.py        names, addresses and interfaces: verdicts, pure; network_facts.py asks
times.py          times and numbers of a launch that contradict each other, pure
environment.py    variables that are forgotten, contradict or do harm, pure
meeting.py        the place where the nodes are to meet: bound, or called; at_etcd.py asks etcd
openings.py       what the agent opens besides: metrics, the page, a handler of events
torch_check.py    what torch there is, asked in a process of its own (torch_probe.py)
paths.py          `--gpu`: real jobs on the GPUs; path_program.py is what their workers run
examination.py    all checks side by side, each with a time limit
child.py          a process with a time limit

Nothing here imports torch but the two programs that run in processes of their own.
"""
