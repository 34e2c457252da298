"""The entry points that users of torchrun, Bagua and torchelastic 0.2 know: `run`, `launch`."""
