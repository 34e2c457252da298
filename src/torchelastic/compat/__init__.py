"""Any process: the module names and APIs of torchelastic 0.1 and 0.2, and of torchrun."""
