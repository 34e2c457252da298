from dataclasses import replace

from tests.unit.cli.cast import HOSTILE
from tests.unit.events.stories import failure
from torchelastic.cli.failure_text import in_brief, in_full
from torchelastic.events.analysis.last_failure import FailureView
from torchelastic.events.failure import node_failure

CAUSE = failure(
    message="killed by SIGKILL: out of memory",
    hint="out of memory: the kernel killed it (limit 2.0 GiB; its log names the process)",
    log_lines=("loading", "step 7"),
    collective="all_reduce #14",
)
FELL = failure(node="a", rank=0, message="lost a peer: rank 2")


def seen(cause=CAUSE, *consequences, **more) -> FailureView:
    return FailureView(
        generation=0,
        wall=1000.0,
        sentence=cause.sentence(),
        cause=cause,
        consequences=consequences,
        **more,
    )


def test_in_full():
    assert in_full(seen(CAUSE, *(FELL,) * 1000), 96)[-1] == "  and 992 more"
    assert in_full(seen(CAUSE, FELL), 96) == [
        "rank 2 on b (local rank 0, pid 42) at step 7: killed by SIGKILL: out of memory",
        "hint: out of memory: the kernel killed it (limit 2.0 GiB; its log names the process)",
        "last collective: all_reduce #14",
        "last lines of its output:",
        "  loading",
        "  step 7",
        "failed because of it:",
        "  rank 0 on a (local rank 0, pid 42) at step 7: lost a peer: rank 2",
    ]


def test_failure_text_leaves_out_unknown_facts():
    told = replace(CAUSE, hint="", log_lines=(), collective="", traceback="T\n  x\nE: boom\n")
    assert in_full(seen(told), 96)[1:] == ["T", "  x", "E: boom"]


def test_a_hang_is_shown_once():
    hang = {"text": "rank 2 is missing from all_reduce #14", "missing": [2], "ranks": []}
    assert f"hang: {hang['text']}" in in_full(seen(hang=hang), 96)
    hung = replace(CAUSE, message=f"the worker hangs: {hang['text']}")
    assert not [line for line in in_full(seen(hung, hang=hang), 96) if line.startswith("hang:")]
    assert f"hang: {hang['text']}" in in_brief(seen(hung, hang=hang))


def test_the_brief_form_shows_the_top_frame_of_a_dumped_stack():
    main = (
        'main thread, most recent call first:\n  File "t.py", line 9 in step\n  File "t.py", line 3'
    )
    other = 'Thread 0x7f (most recent call first):\n  File "pool.py", line 81 in work\n\n'
    dumped = main.replace(
        "main thread, most recent call first", "Current thread 0x7e (most recent call first)"
    )
    for stack in (main, other + dumped):
        assert '  File "t.py", line 9 in step' in in_brief(seen(replace(CAUSE, traceback=stack)))
    spied = 'Process 4: t.py\n\nThread 4 (idle): "MainThread"\n    step (t.py:9)\n    main (t.py:3)'
    assert "    step (t.py:9)" in in_brief(seen(replace(CAUSE, traceback=spied)))
    only = replace(CAUSE, traceback=other)
    assert '  File "pool.py", line 81 in work' in in_brief(seen(only))


def test_in_brief():
    gone = node_failure("node-c", 0, "its lease has ended")
    assert in_brief(seen(CAUSE, FELL, gone)) == [
        "rank 2 on b (local rank 0, pid 42) at step 7: killed by SIGKILL: out of memory",
        "hint: out of memory: the kernel killed it (limit 2.0 GiB; its log names the process)",
        "last collective: all_reduce #14",
        "step 7",
        "failed because of it: rank 0, node-c",
    ]


def test_the_same_failure_elsewhere_is_a_cause_too():
    same = replace(CAUSE, rank=1, by_itself=True)
    assert in_brief(seen(CAUSE, same, FELL))[-2:] == [
        "also failed, independently: rank 1",
        "failed because of it: rank 0",
    ]
    assert "also failed, independently:" in in_full(seen(CAUSE, same), 96)
    assert "failed because of it:" not in in_full(seen(CAUSE, same), 96)


def test_text_of_a_worker_cannot_control_the_terminal():
    texts = {name: HOSTILE for name in ("node", "message", "traceback", "hint", "collective")}
    hostile = replace(CAUSE, log_lines=(HOSTILE,), **texts)
    view = seen(hostile, hostile, hang={"text": HOSTILE})
    for line in (*in_full(view, 96), *in_brief(view)):
        assert not set(line) & {"\x1b", "\x07", "\r", "\n", "\u202e", "\x9b"}
