"""Worker process: the code around the user's code, and its channel to the agent.

bootstrap         runs around the user's code: reports failures, calls functions (`__main__`)
channel           this worker's socket to its agent; orders: the messages on it
status_page       memory that the agent reads: step, collective, what this worker waits for
collective_log    the last collectives, on the status page
optimizer_steps   counts the steps of a script by those of its optimizers
backward_waits    estimates how long a script waits for other workers
error_file        `error.json`, the error of a failed worker
repeated_error    detects the same traceback as in earlier generations
stack_dump        writes the stack of the main thread when the agent asks for it
leaving           `torchelastic.leaving()`; a scheduler's signals, which are left to the agent
handed_secret     passes the job's secret from the agent to a worker through a pipe
store_host        the process that holds TCPStores for the agent
store_sockets     keep-alive probes on the connections to torch's store
worker_stores     the TCPStores of a process that hosts them itself
"""
