"""Worker process: counters that its agent reads: samples, checkpoints, stalled time."""
