"""Worker process: the parts of a training state, as trees of tensors and as bytes."""
