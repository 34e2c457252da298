"""Agent process: the memory that holds a node's snapshots, and their copies on other nodes.

snapshot_service  answers the workers, and sends what they sealed to the nodes it chooses
memory            the memories of a node: its own pieces, and replicas of others'
replicator        gives a version to another agent, or fetches one
stream            the bytes on the connection between two agents
"""
