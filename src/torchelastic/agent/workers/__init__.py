"""Agent process: the worker processes of a node, from start to exit."""
