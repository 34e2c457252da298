"""Agent process: one per node, it starts, watches and stops the workers of the node."""
