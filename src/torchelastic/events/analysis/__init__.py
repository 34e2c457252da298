"""Any process: what the event log of a job says about it."""
