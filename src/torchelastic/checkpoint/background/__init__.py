"""Worker process: checkpoints written beside the training, by a thread or a process."""
