"""The reference page of the names of 0.1 and 0.2, from `compat.old_names`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchelastic.compat.old_names import DIFFERENT, OLD_NAMES, REFUSED, difference

_HEAD = """\
# The names of 0.1 and 0.2

Every public module of torchelastic 0.1 and 0.2 can be imported, and most names work as they did.
Some differ, and some are refused with an error that says what to use instead. See also
[From Python](../guides/python.md), [Coming from torchrun](../guides/from-torchrun.md), and for a
training written for 0.1 [Coming from release 0.1](../guides/train.md#coming-from-release-01).

Not here: `torchelastic.tsm` with `events.TsmEvent` and `events.record_tsm` (it has become TorchX),
`multiprocessing.error_reporter` and `multiprocessing.popen` (0.2.2 had removed them), and the
constants `CONST_…` of `rendezvous.etcd_rendezvous`.
"""
_MODULES = """
## Every module

*Italic* names differ, ~~struck~~ names are refused; all others are the same.
"""
_TESTS = """
## Upstream's own tests

Tests of the suites of 0.1 (0.1.0rc1 and 1ba0b5a), 0.2.2 and torch's `test_run.py` that fail here,
each with the reason. Tests that import, read or replace private names, or subclass
`SimpleElasticAgent`, are left out.

"""
#: By suite: a test, and the difference it meets.
_FAILING = (
    (
        "0.1 `etcd_elastic_trainer_test`",
        "`test_process_non_retryable_exception`, `test_process_max_retryable_failures`",
        "They expect that a worker whose error comes again leaves, and the others go on. Here such "
        "an error ends the job.",
    ),
    (
        "0.1 `etcd_elastic_trainer_test`",
        "`test_checkpoint`",
        "It kills all workers in the next step and expects every checkpoint: they are written in "
        "the background.",
    ),
    (
        "0.1 `etcd_elastic_trainer_test`",
        "`test_new_processes_join`",
        "It replaces `CoordinatorP2P.rendezvous_barrier`, which is not called, and waits for it.",
    ),
    (
        "0.1 `launch_test`",
        "`test_launch_elastic`, `test_launch_user_script_python`, `test_launch_user_script_bash`",
        "They expect `--local_rank` in the script's arguments. As since 0.2.0, it is only in "
        "`LOCAL_RANK`; `--no-use-env` passes `--local-rank` as well.",
    ),
    (
        "0.1 `agent/server`",
        "all",
        "They need `MonitorResult` or `WorkerGroupFailureException`.",
    ),
    (
        "0.1 and 0.2.2 `metrics/api_test`",
        "`test_inheritance`, `test_profile`",
        "They replace `metrics.api.getStream`.",
    ),
    (
        "0.2.2 `launch_test`, torch `test_run`",
        "`test_nproc_gpu_launch_configurations`, `test_nproc_xpu_launch_configurations`",
        "They replace `torch.cuda`: devices are counted without torch.",
    ),
    (
        "0.2.2 `launch_test`, torch `test_run`",
        "`test_launch_elastic_worker_raise_exception`",
        "The error is raised, but the launcher does not call `events.record`.",
    ),
    (
        "0.2.2 `launch_test`, torch `test_run`",
        "`test_launch_elastic_agent_raise_exception`, `test_launch_shutdown`",
        "They replace `LocalElasticAgent`: the agent is another process.",
    ),
    (
        "torch `test_run`",
        "`test_launch_user_script_default_nproc`",
        "`torchelastic.distributed.run` has Bagua's defaults: `--nproc-per-node auto`.",
    ),
    (
        "0.2.2 `etcd_server_test`",
        "`test_etcd_server_start_stop`, `test_etcd_server_with_rendezvous`",
        "They use etcd's v2 API.",
    ),
    (
        "0.2.2 `errors/test`",
        "`test_process_failure_no_error_file`",
        "It compares the text of `ProcessFailure.message`, which is torch's.",
    ),
    (
        "0.2.2 `errors/test`",
        "`test_record_child_failure`, `test_copy_error_file`, "
        "`test_copy_error_file_overwrite_existing`",
        "torch's `record` adds the exit code to the copy of the child's error file, by "
        "`ErrorHandler.dump_error_file`, which was `copy_error_file`.",
    ),
    (
        "0.2.2 `utils/test/distributed_test`",
        "`test_create_store_timeout_on_server`, `test_create_store_timeout_on_worker`, "
        "`test_port_already_in_use_on_server`",
        "The function is torch's, which raises `DistStoreError` or `DistNetworkError`, not "
        "`TimeoutError` or `OSError`.",
    ),
    (
        "0.2.2 `utils/test/distributed_test`",
        "`test_port_already_in_use_on_worker`",
        "The function is torch's, which waits for minutes if the port's owner does not answer.",
    ),
    (
        "0.2.2 `local_elastic_agent_test`",
        "`test_barrier_failed`",
        "It replaces `utils.store.barrier`: the agent is another process.",
    ),
    (
        "0.2.2 `multiprocessing/test/api_test`",
        "`test_function_exit`",
        "It compares the text of `ProcessFailure.message`, which is torch's.",
    ),
    (
        "0.2.2 `multiprocessing/test/api_test`",
        "`test_binary_exit`, `test_binary_raises`",
        "They expect one failure. torch's also has the program that was stopped because the other "
        "one failed.",
    ),
    (
        "0.2.2 `multiprocessing/test/api_test`",
        "`test_function_signal`",
        "It expects an error file of a process that died of SIGSEGV. torch's `start_processes` "
        "leaves none.",
    ),
    (
        "0.2.2 `multiprocessing/test/api_test`",
        "`test_multiprocessing_context_poll_raises_exception`",
        "It calls the constructor of `MultiprocessContext`.",
    ),
    (
        "0.2.2 `tail_log_test`",
        "`test_tail`",
        "It passes `interval_sec` as the fourth argument of `TailLog`.",
    ),
    (
        "0.2.2 `tail_log_test`",
        "`test_tail_logfile_error_in_tail_fn`",
        "It replaces `tail_log.log`: the module is torch's.",
    ),
)


def old_apis_page(table: Callable[[tuple[str, ...], Iterable[tuple[str, ...]]], str]) -> str:
    """Return the page; `table` makes a Markdown table."""
    differs = table(
        ("name", "how it differs"), ((f"`{name}`", how) for name, how in DIFFERENT.items())
    )
    refused = table(("name", "the error"), ((f"`{name}`", said) for name, said in REFUSED.items()))
    modules = table(
        ("`torchelastic.`…", "release", "names"),
        (
            (
                f"`{path}`" if path else "",
                release,
                ", ".join(_shown(path, name) for name in names.split()),
            )
            for path, (release, names) in OLD_NAMES.items()
        ),
    )
    return (
        f"{_HEAD}\n## Different\n\n{differs}\n## Refused\n\n{refused}{_MODULES}\n{modules}"
        f"{_TESTS}{table(('suite', 'test', 'why'), _FAILING)}"
    )


def _shown(path: str, name: str) -> str:
    if name in REFUSED:
        return f"~~`{name}`~~"
    return f"*`{name}`*" if difference(path, name) else f"`{name}`"
