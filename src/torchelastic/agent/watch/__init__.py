"""Agent process: hang watchdog, stack traces, timers, and answers to `torchelastic stacks`.

hang_watchdog         in-process workers without progress; the limits for both kinds
script_hang_watchdog  the same for scripts
hang_report           who is missing from which collective, reported once per hang
stack_reader          stacks of this node's workers; inspector: of all ranks, through their agents
query_socket          answers local commands
worker_timers         kills workers whose timer expired; file_timers: those of torch
"""
