"""Agent process: this node's membership in a job: session, record, lease, failover."""
