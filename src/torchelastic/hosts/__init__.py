"""Launching process: one command that runs a job on several machines (`run --hosts`), over ssh.

host_list     the hosts and their workers, from a flag, a file or a command
host_plan     decides which hosts to start and which to ask to leave; pure
host_launcher performs that: one ssh per host, their output, signals, the exit code
remote        the program on each host: it starts the agent and outlives the connection
"""
