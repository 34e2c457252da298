"""Worker process: `State` and `TorchState`, the training state that survives a failure."""
