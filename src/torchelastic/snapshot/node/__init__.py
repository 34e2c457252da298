"""Agent process: the memory that holds a node's snapshots, and their copies on other nodes."""
