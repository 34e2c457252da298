"""Worker process: checkpoint storage, and the files of a checkpoint."""
