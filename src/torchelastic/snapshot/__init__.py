"""Snapshots: committed state in memory that the agent holds, and its replicas on other nodes."""
