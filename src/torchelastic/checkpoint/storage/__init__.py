"""Worker process: where checkpoints are stored, and the files they consist of."""
