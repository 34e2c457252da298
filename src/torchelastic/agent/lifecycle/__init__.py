"""Agent process: the two state machines of a node's workers, `script` and `in_process`. Pure."""
