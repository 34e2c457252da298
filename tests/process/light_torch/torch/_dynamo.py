"""Nothing to compile."""
