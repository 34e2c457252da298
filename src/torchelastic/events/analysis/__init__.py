"""Any process: the state and history of a job, computed from its event logs.

find_job          finds a job and its event logs; follow: reads files while they grow
view              the state of a job, folded from its records; live_view: of a running job
ranks             step, rate, node and local rank of each worker
goodput           where the time of a job went
recoveries        the cost of each change of the world
last_failure      the first cause of the last failure, and its consequences
bad_steps         steps with bad numbers, and the samples that were skipped
hangs             which ranks are missing from a collective
stragglers        which ranks are slow, and what that costs
series            curves over a whole job
trace_export      a job as a Chrome trace, for Perfetto
"""
