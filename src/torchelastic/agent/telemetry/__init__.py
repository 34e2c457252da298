"""Agent process: the event log of the job, shipped to the leader; metrics; the dashboard.

reporter           writes events and the lines on stderr
progress_sampler   how far the workers are, about once a second
shipper            sends this node's events to the leader
collector          the leader's side: writes the events of all nodes to one file
clock_offset       the leader's clock, and how often to ship; pure
job_events         the events of the whole job as they come, on the leader
straggler_watch    slow nodes, found by the leader
bad_step_watch     steps with bad numbers, logged by the leader
http_endpoints     `--metrics-address` and `--health-port`
dashboard_process  `--dashboard`
"""
