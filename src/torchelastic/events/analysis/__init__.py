"""Any process: the state and history of a job, computed from its event logs."""
