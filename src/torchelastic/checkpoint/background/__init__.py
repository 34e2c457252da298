"""Worker process: checkpoints written in the background, by a thread or a process."""
