"""What measures: launchers, jobs, the workers' logs, scenarios, statistics, report."""
