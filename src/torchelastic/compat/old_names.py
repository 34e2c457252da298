"""Every public name of torchelastic 0.1 (0.1.0rc1, and 0.1 as of 1ba0b5a) and 0.2 (0.2.0 to 0.2.2).

A name works as it did, unless it is in `DIFFERENT` or in `REFUSED`. docs/reference/old-apis.md is
written from these tables.
"""

from __future__ import annotations

#: By module: the releases that had it, and its public names.
OLD_NAMES = {
    "": (
        "0.1",
        "Coordinator NonRetryableException SimpleWorkerStats State StopException WorkerStats "
        "run_train train",
    ),
    "checkpoint": (
        "0.1",
        "Checkpoint CheckpointManager CheckpointUtil FileSystemCheckpointManager "
        "get_checkpoint_manager set_checkpoint_manager",
    ),
    "checkpoint.api": (
        "0.1",
        "Checkpoint CheckpointBarrier CheckpointManager CheckpointUtil get_checkpoint_manager "
        "set_checkpoint_manager",
    ),
    "checkpoint.file_system_checkpoint": (
        "0.1",
        "FileSystemCheckpoint FileSystemCheckpointManager",
    ),
    "coordinator": ("0.1", "Coordinator NonRetryableException StopException"),
    "distributed": (
        "0.1",
        "all_gather_return_max_long broadcast_binary broadcast_bool broadcast_float_list "
        "broadcast_long broadcast_model convert_to_distributed_tensor convert_to_normal_tensor "
        "get_rank is_distributed_training_run",
    ),
    "distributed.collectives": (
        "0.1",
        "all_gather_return_max_long broadcast_binary broadcast_bool broadcast_float_list "
        "broadcast_long broadcast_model convert_to_distributed_tensor convert_to_normal_tensor "
        "is_distributed_training_run",
    ),
    "distributed.utils": ("0.1", "get_rank"),
    "event_logger": (
        "0.1",
        "ConsoleEventLogHandler EventLogHandler NullEventLogHandler configure get_event_logger",
    ),
    "event_logger.api": (
        "0.1",
        "ConsoleEventLogHandler EventLogHandler NullEventLogHandler configure get_event_logger",
    ),
    "fault_injection": ("0.1", "start_fault_injection_thread"),
    "p2p": ("0.1", "CoordinatorP2P"),
    "p2p.coordinator_p2p": ("0.1", "CoordinatorP2P"),
    "state": ("0.1", "State"),
    "train_loop": ("0.1", "MAX_FAILURES run_train to_generator train"),
    "worker_stats": ("0.1", "SimpleWorkerStats WorkerStats"),
    "rendezvous.parameters": ("0.1, 0.2.0", "RendezvousParameters get_rendezvous"),
    "version": ("0.1, 0.2", "__version__"),
    "agent.server": (
        "0.1, 0.2",
        "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec WorkerState",
    ),
    "agent.server.api": (
        "0.1, 0.2",
        "DEFAULT_ROLE ElasticAgent MonitorResult RunResult SimpleElasticAgent Worker WorkerGroup "
        "WorkerGroupFailureException WorkerSpec WorkerState",
    ),
    "agent.server.local_elastic_agent": ("0.1, 0.2", "LocalElasticAgent"),
    "distributed.argparse_util": ("0.2", "check_env env"),
    "distributed.launch": (
        "0.1, 0.2",
        "determine_local_world_size main parse_args parse_min_max_nnodes wrapper_fn",
    ),
    "events": (
        "0.2",
        "ConsoleEventHandler Event EventHandler EventMetadataValue EventSource configure "
        "get_logging_handler record record_event",
    ),
    "events.api": (
        "0.2",
        "ConsoleEventHandler Event EventHandler EventMetadataValue EventSource NullEventHandler "
        "configure record record_event",
    ),
    "events.handlers": ("0.2", "get_logging_handler"),
    "metrics": (
        "0.1, 0.2",
        "ConsoleMetricHandler MetricData MetricHandler MetricsConfig NullMetricHandler configure "
        "getStream get_elapsed_time_ms initialize_metrics prof profile publish_metric put_metric",
    ),
    "metrics.api": (
        "0.1, 0.2",
        "ConsoleMetricHandler MetricData MetricHandler MetricStream MetricsConfig "
        "NullMetricHandler configure getStream get_elapsed_time_ms prof profile publish_metric "
        "put_metric",
    ),
    "multiprocessing": (
        "0.2",
        "MultiprocessContext PContext ProcessFailure RunProcsResult Std SubprocessContext "
        "start_processes to_map",
    ),
    "multiprocessing.api": (
        "0.2",
        "MultiprocessContext PContext RunProcsResult Std SubprocessContext SubprocessHandler "
        "to_map",
    ),
    "multiprocessing.errors": (
        "0.2",
        "ChildFailedError ErrorHandler GlobalRank JSON ProcessFailure get_error_handler record",
    ),
    "multiprocessing.errors.error_handler": ("0.2", "ErrorHandler"),
    "multiprocessing.errors.handlers": ("0.2", "get_error_handler"),
    "multiprocessing.redirects": ("0.2", "redirect redirect_stderr redirect_stdout"),
    "multiprocessing.tail_log": ("0.2", "TailLog tail_logfile"),
    "rendezvous": (
        "0.1, 0.2",
        "RendezvousClosedException RendezvousException RendezvousHandler RendezvousHandlerFactory "
        "RendezvousNonRetryableError RendezvousParameters RendezvousTimeoutException",
    ),
    "rendezvous.api": (
        "0.1, 0.2",
        "RendezvousClosedException RendezvousException RendezvousHandler RendezvousHandlerCreator "
        "RendezvousHandlerFactory RendezvousNonRetryableError RendezvousParameters "
        "RendezvousTimeoutException",
    ),
    "rendezvous.etcd_rendezvous": (
        "0.1, 0.2",
        "EtcdRendezvous EtcdRendezvousHandler EtcdRendezvousRetryImmediately "
        "EtcdRendezvousRetryableFailure EtcdStore cas_delay create_rdzv_handler setup_tcpstore",
    ),
    "rendezvous.etcd_server": ("0.2", "EtcdServer find_free_port stop_etcd"),
    "rendezvous.registry": ("0.2", "get_rendezvous_handler"),
    "timer": (
        "0.1, 0.2",
        "LocalTimerClient LocalTimerServer TimerClient TimerRequest TimerServer configure expires",
    ),
    "timer.api": (
        "0.1, 0.2",
        "RequestQueue TimerClient TimerRequest TimerServer configure expires",
    ),
    "timer.local_timer": (
        "0.1, 0.2",
        "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue",
    ),
    "utils": ("0.2", "get_env_variable_or_raise"),
    "utils.api": ("0.2", "get_env_variable_or_raise"),
    "utils.data": ("0.1, 0.2", "CyclingIterator ElasticDistributedSampler"),
    "utils.data.cycling_iterator": ("0.1, 0.2", "CyclingIterator"),
    "utils.data.elastic_distributed_sampler": ("0.1, 0.2", "ElasticDistributedSampler"),
    "utils.distributed": ("0.2", "create_c10d_store get_free_port get_socket_with_port"),
    "utils.logging": ("0.2", "get_logger"),
    "utils.store": ("0.2", "barrier get_all synchronize"),
}

#: The import paths of 0.1, 0.2 and torch that are files of at most 10 lines. They
#: only re-export names from their new module.
PATHS = """
coordinator checkpoint.api checkpoint.file_system_checkpoint distributed.collectives
event_logger event_logger.api fault_injection p2p p2p.coordinator_p2p rendezvous.parameters
state train_loop version worker_stats distributed.utils utils utils.data
utils.data.cycling_iterator utils.data.elastic_distributed_sampler agent.server agent.server.api
agent.server.local_elastic_agent distributed.argparse_util launcher.api metrics.api
multiprocessing multiprocessing.api multiprocessing.errors multiprocessing.errors.error_handler
multiprocessing.errors.handlers multiprocessing.redirects multiprocessing.tail_log
rendezvous.api rendezvous.etcd_rendezvous rendezvous.etcd_server rendezvous.registry
rendezvous.utils timer.api timer.file_based_local_timer timer.local_timer utils.api
utils.distributed utils.logging utils.store
"""

#: Names that do not work exactly as they did.
DIFFERENT = {
    "CheckpointUtil": "A checkpoint is loaded only if no worker has a newer state.",
    "ChildFailedError": "A subclass of torch's. `failures` has the failed ranks of the whole job; "
    "the text and `get_first_failure` name the root cause.",
    "ConsoleEventLogHandler": "Prints the event; 0.1's raised `IndexError`.",
    "Coordinator": "`train` takes a `CoordinatorP2P` or a subclass of it.",
    "CoordinatorP2P": "`rendezvous_barrier`, `init_process_group` and `barrier` of a subclass are "
    "not called, and a warning says so. A collective times out after 30 minutes by default, not "
    "10 seconds.",
    "ElasticDistributedSampler": "`start_index` counts the samples taken in this epoch's order. It "
    "was an offset in the dataset: after a resize some samples came twice, others never.",
    "ErrorHandler": "torch's own: `copy_error_file` is called `dump_error_file`.",
    "EtcdRendezvousHandler": "Takes `RendezvousParameters`, not an `EtcdRendezvous`.",
    "EtcdServer": "Serves etcd's v3 API; `get_client` is refused.",
    "Event": "Accepts the arguments of 0.2.1 and of 0.2.2; `type` and `source` are one field.",
    "FileSystemCheckpointManager": "Creates its directory; a checkpoint is visible only when it is "
    "complete.",
    "LocalElasticAgent": "`run` waits for an agent process and returns a `RunResult` (0.2.2). "
    "`start_method`, `exit_barrier_timeout` and a subclass's hooks have no effect.",
    "MultiprocessContext": "torch's own: its constructor takes `logs_specs`.",
    "PContext": "torch's own: its constructor takes `logs_specs`.",
    "ProcessFailure": "torch's own. Of an agent's worker, `message` without an error file is our "
    "sentence, such as `exit code 3` or `killed by SIGSEGV (…)`, and "
    "`error_file` is `<N/A>` if it is on another machine.",
    "RendezvousHandler": "In a `WorkerSpec`, only a handler from `get_rendezvous_handler` is "
    "accepted.",
    "RendezvousHandlerFactory": "Errors are `ConfigError`, which is a `ValueError`.",
    "RendezvousParameters": "A range of nodes that is not valid raises `ConfigError` (a "
    "`ValueError`), not `AssertionError`.",
    "RunProcsResult": "torch's own: of programs, `failures` also has those that were stopped "
    "because another one failed.",
    "SubprocessContext": "torch's own: its constructor takes `logs_specs`.",
    "TailLog": "torch's own: pass `interval_sec` by name, it is not the fourth argument.",
    "Worker": "`id` is always None: the processes belong to the agent.",
    "WorkerGroup": "`store` is always None; the ranks are set when the job has ended.",
    "WorkerSpec": "`max_restarts` is the budget of the whole job; `monitor_interval` and "
    "`master_port` have no effect.",
    "create_c10d_store": "torch's own: a time-out raises `DistStoreError` or `DistNetworkError`, "
    "not `TimeoutError`; a port in use `DistNetworkError`, not `OSError`.",
    "determine_local_world_size": "Devices are counted without torch.",
    "events.record": "By default events are discarded: call `configure`, or pass "
    '`destination="console"`. The launcher does not call it: its own events are in the event log.',
    "events.api.record": "As `events.record`.",
    "getStream": "`put_metric` and `prof` do not look it up in `metrics.api`: a replaced one is "
    "not used.",
    "main": "Without `--rdzv-endpoint`, one node needs no etcd. The job runs in an agent process, "
    "so `LocalElasticAgent` and `get_rendezvous_handler` are not called in this one.",
    "parse_args": "The namespace also has our flags.",
    "run_train": "As `train`.",
    "train": '`RuntimeError` does not mean "try again": errors are classified by their type. One '
    "that comes again ends the job; in 0.1 only its worker left. A step that a lost worker "
    "interrupts is redone. Checkpoints are written in the background: what the last step saved is "
    "not yet in storage when the next one begins. With etcd, a worker that starts after the end "
    "begins the job again; in 0.1 it ended, too.",
}

_ETCD_V2 = "needs etcd's v2 API, which etcd 3.6 no longer has"
#: Names that raise an error, with its sentence.
REFUSED = {
    "CheckpointBarrier": "CheckpointBarrier is gone: ranks agree on a checkpoint without it. "
    "Remove the import.",
    "EtcdRendezvous": f"EtcdRendezvous {_ETCD_V2}: call "
    'create_rdzv_handler(RendezvousParameters("etcd", endpoint, run_id, ...)).',
    "EtcdRendezvousRetryImmediately": "EtcdRendezvousRetryImmediately is gone: handlers retry by "
    "themselves. Remove the import.",
    "EtcdRendezvousRetryableFailure": "EtcdRendezvousRetryableFailure is gone: handlers retry by "
    "themselves. Remove the import.",
    "EtcdStore": f"EtcdStore {_ETCD_V2}: use the store that "
    "next_rendezvous() returns, or torch.distributed.TCPStore.",
    "MonitorResult": "MonitorResult is gone since 0.2.2: LocalElasticAgent.run returns a "
    "RunResult; check its is_failed().",
    "SimpleElasticAgent": "A subclass of SimpleElasticAgent cannot start workers: only the agent "
    "process of torchelastic does. Use LocalElasticAgent, or elastic_launch.",
    "SubprocessHandler": "SubprocessHandler is gone: use start_processes, or Python's subprocess.",
    "WorkerGroupFailureException": "WorkerGroupFailureException is gone since 0.2.2: "
    "LocalElasticAgent.run returns a RunResult; check its is_failed().",
    "cas_delay": "cas_delay is gone: nothing here retries with a random delay. Remove the import.",
    "find_free_port": "find_free_port is gone: use "
    "torchelastic.utils.distributed.get_socket_with_port.",
    "setup_tcpstore": "setup_tcpstore is gone: next_rendezvous() returns the store.",
    "stop_etcd": "stop_etcd is gone: call EtcdServer.stop().",
    "wrapper_fn": "wrapper_fn is gone since 0.2.2: workers run the script directly. Call main or "
    "launch.",
}
#: Those of them that are classes here, and refuse to be created.
REFUSED_CLASSES = ("EtcdRendezvous", "EtcdStore", "SimpleElasticAgent")


def difference(module: str, name: str) -> str | None:
    """Return how a name differs; None: it does not."""
    return DIFFERENT.get(f"{module}.{name}", DIFFERENT.get(name))


def __getattr__(name: str) -> object:
    """Refuse a name of an earlier release with its sentence. Modules that had one import this."""
    if name in REFUSED:
        raise ImportError(REFUSED[name])
    raise AttributeError(f"There is no '{name}' here.")
