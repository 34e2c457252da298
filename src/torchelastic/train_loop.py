"""A module name of 0.1's."""

from torchelastic.training.train import MAX_FAILURES, run_train, to_generator, train

__all__ = ["MAX_FAILURES", "run_train", "to_generator", "train"]
