"""Launching process: APIs of torchelastic 0.2 that the rest of the package does not need."""
