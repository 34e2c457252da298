"""Agent process: hang watchdog, stack traces, timers, and answers to `torchelastic stacks`.

hang_watchdog         workers without progress, and the report of a hang
stack_reader          stacks of this node's workers
inspector             stacks of all ranks, through their agents; answers local commands
worker_timers         kills workers whose timer expired, torch's own timers included
"""
