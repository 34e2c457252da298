"""Worker process: APIs of torchelastic 0.1 that the rest of the package does not need."""
