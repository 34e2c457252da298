"""The import paths of torchelastic 0.1 and 0.2, and of torch, that work here.

Each is a file of at most 10 lines that only re-exports names from their new module.
"""

PATHS = (
    # 0.1
    "coordinator",
    "event_logger",
    "fault_injection",
    "p2p",
    "p2p.coordinator_p2p",
    "state",
    "train_loop",
    "worker_stats",
    "distributed.utils",
    "utils",
    "utils.data",
    "utils.data.cycling_iterator",
    "utils.data.elastic_distributed_sampler",
    # 0.2, most of them torch's as well
    "agent.server",
    "agent.server.api",
    "agent.server.local_elastic_agent",
    "launcher.api",
    "metrics.api",
    "multiprocessing",
    "multiprocessing.api",
    "multiprocessing.errors",
    "multiprocessing.errors.error_handler",
    "multiprocessing.errors.handlers",
    "rendezvous.api",
    "rendezvous.etcd_rendezvous",
    "rendezvous.etcd_server",
    "rendezvous.parameters",
    "rendezvous.registry",
    "timer.api",
    "timer.file_based_local_timer",
    "timer.local_timer",
    "utils.distributed",
    "utils.logging",
    # documented here before the module moved
    "events.goodput",
)
