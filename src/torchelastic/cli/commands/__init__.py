"""Command line: one module per command of `torchelastic`."""
