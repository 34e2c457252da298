from dataclasses import replace
from datetime import datetime

import pytest

from tests.unit.agent.cast import place
from torchelastic.agent import failure_report
from torchelastic.config import Entry, LaunchConfig
from torchelastic.events.failure import Failure, node_failure
from torchelastic.rendezvous.world import World
from torchelastic.worker.orders import Begins

CAUSE = Failure(
    generation=3,
    node="node-b",
    rank=2,
    local_rank=0,
    pid=123,
    exitcode=1,
    message="RuntimeError: boom\nwith a second line",
    traceback='Traceback (most recent call last):\n  File "t.py", line 1\nRuntimeError: boom\n',
    step=17,
    error_file="/logs/error.json",
    wall_time=datetime(2026, 5, 1, 12, 30, 0, 250_000).timestamp(),
)
FELL = replace(
    CAUSE, node="node-a", rank=0, pid=77, message="Connection closed by peer", traceback=""
)


WORLD = World(
    generation=3,
    phase="closed",
    reason=f"{CAUSE.sentence()}; all 3 restarts used (--max-restarts)",
    cause=CAUSE,
    consequences=(FELL,),
    exitcode=1,
).with_nodes([place("node-a"), place("node-b")])


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (1, "exit code 1"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV (segmentation fault in native code)"),
        (-6, "killed by SIGABRT (it called abort(); often a failed check in C++ code)"),
        (-7, "killed by SIGBUS (bus error, often a full /dev/shm or disk behind mapped memory)"),
        (-99, "killed by signal 99"),
        (126, "exit code 126 (the shell could not execute the command)"),
        (127, "exit code 127 (the shell did not find the command)"),
        (128, "exit code 128"),
        (137, "exit code 137 (a shell's code for SIGKILL)"),
        (255, "exit code 255"),
    ],
)
def test_exit_words(exitcode, words):
    assert failure_report.exit_words(exitcode) == words


def test_the_last_block_names_the_first_failure_of_the_job_and_who_fell_because_of_it():
    assert failure_report.job_failed(WORLD, name="train.py") == (
        "\n"
        "============================================================\n"
        "train.py FAILED in generation 3: all 3 restarts used (--max-restarts)\n"
        "------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        "  time      : 2026-05-01_12:30:00.250\n"
        "  host      : node-b\n"
        "  rank      : 2 (local_rank: 0)\n"
        "  step      : 17\n"
        "  exitcode  : 1 (pid: 123)\n"
        "  error_file: /logs/error.json\n"
        "  error     : RuntimeError: boom\n"
        "  with a second line\n"
        "  traceback : Traceback (most recent call last):\n"
        '    File "t.py", line 1\n'
        "  RuntimeError: boom\n"
        "------------------------------------------------------------\n"
        "Failed as a consequence:\n"
        "  rank 0 on node-a (local rank 0, pid 77) at step 17: Connection closed by peer\n"
        "============================================================"
    )


def test_independent_failure_is_not_blamed_on_first():
    same = replace(CAUSE, rank=3, by_itself=True)
    text = failure_report.job_failed(replace(WORLD, consequences=(same, *WORLD.consequences)))
    assert "Failed independently:\n  rank 3 on node-b" in text
    assert "boom\nFailed as a consequence:\n  rank 0 on node-a" in text
    text = failure_report.job_failed(replace(WORLD, consequences=(same,)))
    assert "Failed as a consequence" not in text
    assert "No other failures" not in text


def test_report_of_a_killed_worker_has_hint_last_lines_and_no_traceback():
    killed = replace(CAUSE, exitcode=-9, message="killed by SIGKILL", traceback="", step=None)
    bare = replace(WORLD, cause=replace(killed, error_file=""), consequences=())
    text = failure_report.job_failed(bare)
    assert "  exitcode  : -9 (pid: 123) (SIGKILL)\n  error_file: <N/A>\n" in text
    assert "  step" not in text
    assert "No other failures." in text
    hint = "out of memory: the kernel killed it (limit 2.0 GiB)"
    facts = {"hint": hint, "collective": "all_reduce #14", "log_lines": ("loading", "step 17")}
    assert (
        "  error     : killed by SIGKILL\n"
        "  hint      : out of memory: the kernel killed it (limit 2.0 GiB)\n"
        "  collective: all_reduce #14\n"
        "  traceback : none: the worker ended without a Python exception\n"
        "  last lines:\n"
        "    loading\n"
        "    step 17\n"
        "-----"
    ) in failure_report.job_failed(replace(WORLD, cause=replace(killed, **facts)))


def test_a_node_may_be_the_cause():
    gone = node_failure("node-b", 3, "its lease has ended")
    world = replace(WORLD, cause=gone, reason="node-b failed; no restarts are allowed")
    text = failure_report.job_failed(world)
    assert "job FAILED in generation 3: node-b failed; no restarts are allowed\n" in text
    assert "[0]:\n  host      : node-b\n  error     : its lease has ended\n----" in text
    assert "Failed as a consequence:\n  rank 0 on node-a" in text


def test_with_hint():
    for hint in ("", "the kernel reports no out-of-memory kill", "perhaps out of memory: x"):
        assert failure_report.with_hint("killed by SIGKILL", hint) == "killed by SIGKILL"
    certain = failure_report.with_hint("killed by SIGKILL", "out of memory: the kernel killed it")
    assert certain == "killed by SIGKILL: out of memory"


def test_a_job_may_end_without_a_failing_worker():
    text = failure_report.job_failed(
        replace(WORLD, cause=None, reason="node-b failed; no restarts")
    )
    assert "job FAILED in generation 3: node-b failed; no restarts\n" in text
    assert "Root Cause" not in text
    assert "Failures:\n  rank 0 on node-a" in text


def test_many_failures_and_nodes_are_counted_not_listed():
    text = failure_report.job_failed(replace(WORLD, consequences=(FELL,) * 1000))
    assert text.count("Connection closed by peer") == 16
    assert "  and 984 more\n" in text
    world = WORLD.with_nodes(place(f"n{number}") for number in range(4096))
    told = "8,192 workers on 4,096 nodes (n0, n1, n2, n3, n4, n5, n6, n7 and 4,088 more)"
    assert told in failure_report.world_sentence(world)
    some = replace(world, nodes=world.nodes[:2], spares=("s",), spare_count=9)
    assert "(n0, n1 and 4,094 more), spare: s and 8 more" in failure_report.world_sentence(some)


def test_world_sentence():
    first = World(generation=0, phase="running", reason="the job starts")
    first = first.with_nodes([place("node-a")])
    assert (
        failure_report.world_sentence(first)
        == "generation 0: 2 workers on 1 node (node-a): the job starts"
    )
    next_one = replace(
        WORLD,
        generation=4,
        reason=f"{CAUSE.sentence()}; 1 of 100 restarts used",
        spares=("c", "d"),
        spare_count=2,
    )
    assert failure_report.world_sentence(next_one) == (
        "generation 4: 4 workers on 2 nodes (node-a, node-b), spare: c, d: rank 2 on node-b "
        "(local rank 0, pid 123) at step 17: RuntimeError: boom; 1 of 100 restarts used"
    )


LOST_PEER = replace(CAUSE, rank=0, message="lost a peer: Connection closed by peer", alive=True)
OVER = replace(WORLD, phase="over", cause=LOST_PEER, reason="rank 0 on node-a lost a peer")


@pytest.mark.parametrize(
    ("over", "following", "reason"),
    [
        (OVER, None, OVER.reason),
        (OVER, replace(OVER, generation=4, phase="running", cause=CAUSE), CAUSE.sentence()),
        (OVER, replace(OVER, generation=4, phase="running", cause=None), OVER.reason),
        (OVER, replace(OVER, phase="closed"), OVER.reason),
        (OVER, replace(OVER, cause=replace(CAUSE, generation=2)), OVER.reason),
        (replace(OVER, cause=CAUSE, reason="boom"), replace(OVER, cause=LOST_PEER), "boom"),
        (replace(OVER, cause=None, reason="b failed"), replace(OVER, cause=CAUSE), "b failed"),
    ],
    ids=["too late", "known", "a leave", "only that", "of an older one", "a cause", "a node"],
)
def test_the_end_of_a_generation_names_the_cause_once_it_is_known(over, following, reason):
    assert failure_report.why_over(over, following) == reason


def test_one_line():
    long, cut = "x" * 300, "x" * 199 + "…"
    lines = {"a": "a", "a\nb": "a …", "\na\n": "a", long: cut, "": ""}
    assert {text: failure_report.one_line(text) for text in lines} == lines


@pytest.mark.parametrize(
    ("entry", "changes", "expected"),
    [
        (
            Entry("script", "train.py", ("--lr", "0.1 x")),
            {},
            "torchelastic run --nnodes=1:4 --nproc-per-node=8 --rdzv-endpoint=node1:29400 "
            "--rdzv-id=job train.py --lr '0.1 x'",
        ),
        (
            Entry("module", "pkg.train"),
            {"rdzv_backend": "static", "node_rank": 0, "rdzv_secret_file": "/s"},
            "torchelastic run --nnodes=1:4 --nproc-per-node=8 --rdzv-backend=static "
            "--rdzv-endpoint=node1:29400 --rdzv-id=job --node-rank=RANK --rdzv-secret-file=/s "
            "-m pkg.train",
        ),
        (Entry("script", "train.py"), {"max_nodes": 1}, ""),
        (Entry("function", "/tmp/call"), {}, ""),
        # Nobody types this for the pods of a Job.
        (Entry("script", "train.py"), {"incarnation": "a pod"}, ""),
    ],
)
def test_the_command_that_other_nodes_need(entry, changes, expected):
    config = LaunchConfig(1, 4, 8, run_id="job", rdzv_endpoint="node1:29400")
    assert failure_report.command_for_others(replace(config, **changes), entry) == expected


ADVICE = (
    " To write checkpoints: torchelastic.checkpoint.set_checkpoint_manager("
    'CheckpointStore("/shared/job", every="auto")).'
)
NONE_SET = (
    "No checkpoint directory is set: if all {} are lost at once, training restarts at step 0."
)
ALL_LOST = (
    "All copies of the training state were lost: training restarts at step 0 (generation 3). "
    "It had reached step 40."
)


@pytest.mark.parametrize(
    ("step", "stored", "best_step", "resident", "said"),
    [
        (0, True, -1, True, ""),
        (0, True, 0, False, ""),
        (12, False, -1, False, ""),
        (12, False, 40, True, ""),
        (0, False, -1, False, NONE_SET.format("nodes") + ADVICE),
        (0, False, 0, True, NONE_SET.format("workers") + ADVICE),
        (0, False, 40, True, ALL_LOST + ADVICE),
        (0, True, 40, False, ALL_LOST),
    ],
)
def test_the_message_about_a_training_that_begins(step, stored, best_step, resident, said):
    begins = Begins(3, step, stored)
    assert failure_report.beginning(begins, best_step=best_step, in_process=resident) == said
