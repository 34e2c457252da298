"""Agent process: the event log of the job, shipped to the leader; metrics; the dashboard."""
