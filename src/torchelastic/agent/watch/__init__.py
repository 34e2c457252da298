"""Agent process: hang watchdog, stack traces, timers, and answers to `torchelastic stacks`."""
