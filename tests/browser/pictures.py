"""Jobs that the page has to show, made up from the types that real pictures are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.analysis import hangs
from torchelastic.events.analysis.bad_steps import BadRank, BadStepView
from torchelastic.events.analysis.goodput import PARTS, Goodput
from torchelastic.events.analysis.last_failure import FailureView
from torchelastic.events.analysis.ranks import RankView
from torchelastic.events.analysis.recoveries import Recovery, RecoveryTotals
from torchelastic.events.analysis.view import HistoryEntry, JobView, NodeView, StoredView, WorldView
from torchelastic.events.failure import Failure

#: When the jobs begin, and when they are looked at, by the wall clock.
BEGAN = 1_800_000_000.0
NOW = BEGAN + 4000.0

#: Texts that would be markup, script, orders to a terminal, other directions, or far too much.
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script><svg onload=alert(3)>",
    "</title></script></pre><h1 id=injected>injected</h1>",
    "\u202emirrored\u2066\u2069\u200f \x1b[2J\x07\x00 \ud800 \u200b",
    "javascript:alert(4)//' onmouseover='alert(5)' \"><a href=x>",
    "z" + "\u0335\u0321\u0489" * 400,
    "w" * 1_000_000,
)

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 88, in <module>
    main()
  File "train.py", line 61, in main
    loss = train_step(model, batch)
  File "train.py", line 34, in train_step
    raise ValueError(f"the batch has {len(batch)} samples, {wanted} are needed")
ValueError: the batch has 17 samples, 32 are needed
"""


def failure(**changes: Any) -> Failure:
    given: dict[str, Any] = {
        "generation": 4,
        "node": "node-b",
        "rank": 3,
        "local_rank": 1,
        "pid": 4711,
        "exitcode": 1,
        "message": "ValueError: the batch has 17 samples, 32 are needed",
        "traceback": TRACEBACK,
        "step": 18_240,
        "collective": "ALLREDUCE #36481",
        "log_lines": ("step 18239: loss 0.4127", "reading shard 17", "shard 17 is short"),
    }
    return Failure(**(given | changes))


def recovery(generation: int, wall: float, **changes: Any) -> Recovery:
    given: dict[str, Any] = {
        "kind": "failure",
        "why": f"rank 3 on node-b (local rank 1, pid {4000 + generation}): killed by SIGKILL",
        "detect": 0.002,
        "agree": 0.046,
        "rebuild": 0.117,
        "transfer": 0.024,
        "redo": 0.08 + 0.3 * (generation % 3),
    }
    return Recovery(generation=generation, wall=wall, **(given | changes))


def worlds_of(
    members: Sequence[Sequence[str]], length: float, workers: int = 2
) -> tuple[WorldView, ...]:
    """Worlds one after the other, each with these nodes; the last one goes on."""
    found = []
    for generation, names in enumerate(members):
        began = BEGAN + 20 + generation * length
        last = generation == len(members) - 1
        found.append(
            WorldView(
                generation=generation,
                nodes=tuple(names),
                count=len(names),
                size=workers * len(names),
                began=began,
                why="the job starts" if generation == 0 else "the nodes have changed",
                ended=None if last else began + length - 0.3,
                end_kind="" if last else "failure",
                end_why="" if last else "rank 3 on node-b: killed by SIGKILL",
            )
        )
    return tuple(found)


def ranks_of(names: Sequence[str], workers: int, step: int) -> tuple[RankView, ...]:
    return tuple(
        RankView(rank=place * workers + local, node=name, step=step - (place + local) % 2, rate=5.1)
        for place, name in enumerate(names)
        for local in range(workers)
    )


def goodput(total: float) -> Goodput:
    shares = dict.fromkeys(PARTS, 0.0) | {
        "startup": 0.021,
        "rendezvous": 0.012,
        "restore": 0.004,
        "redone": 0.017,
        "checkpoint": 0.034,
        "data": 0.011,
        "waiting": 0.028,
        "other": 0.002,
    }
    shares["productive"] = 1 - sum(shares.values())
    return Goodput(
        micros={part: round(share * total * 1e6) for part, share in shares.items()},  # type: ignore[misc]
        disruptions=3,
        redone_steps=4,
        active_nodes=0.81,
        available_nodes=0.87,
    )


def curve(count: int = 240, until: float = NOW) -> list[tuple[float, float]]:
    """Wall clock, and how far the job is from 0 to 1."""
    first = BEGAN + 30
    return [(first + place * (until - first) / count, place / count) for place in range(count)]


def bad_step(step: int, **changes: Any) -> BadStepView:
    given: dict[str, Any] = {
        "reason": "the gradient is not finite",
        "norm": "nan",
        "loss": "nan",
        "deviation": 0.0,
        "action": "skip",
        "origins": (BadRank(rank=3, ids=tuple(range(500, 532)), samples=32, micro_batches=(5,)),),
        "ranks": 1,
        "samples": 192,
    }
    return BadStepView(generation=4, step=step, wall=NOW - 700, **(given | changes))


def training(**changes: Any) -> JobView:
    """Five worlds of two to three nodes, with kills, a resize, and a straggler."""
    a, b, c = "node-a", "node-b", "node-c"
    members = ([a, b], [a, b, c], [a, c], [a, c, b], [a, c, b])
    worlds = worlds_of(members, 790.0)
    ended = [world.ended for world in worlds[:-1] if world.ended is not None]
    slow = events.Straggler(
        rank=3,
        seconds_per_step=0.31,
        usual=0.19,
        cost=41.0,
        text="rank 3 on node-c takes 0.31 s a step of its own, the others 0.19 s: 41 s lost so far",
    )
    given: dict[str, Any] = {
        "job": "llama-finetune-17",
        "phase": "running",
        "generation": 4,
        "size": 6,
        "restarts_used": 2,
        "min_nodes": 2,
        "max_nodes": 4,
        "nodes": {
            a: NodeView(name=a, state="running", leader=True, hosting=True, last_seen=NOW),
            c: NodeView(name=c, state="running", last_seen=NOW),
            b: NodeView(name=b, state="running", last_seen=NOW),
            "node-d": NodeView(name="node-d", state="spare", last_seen=NOW),
        },
        "started": BEGAN,
        "history": (
            HistoryEntry(worlds[-1].began, "generation 4 began", "the nodes have changed"),
        ),
        "step": 19_877,
        "rate": 5.12,
        "stepped": NOW - 0.2,
        "ranks": ranks_of((a, c, b), 2, 19_877),
        "stragglers": (slow,),
        "worlds": worlds,
        "recoveries": (
            recovery(0, ended[0], kind="resize", why="node-c joins", detect=0.0, redo=0.0),
            recovery(1, ended[1], kind="node-failure", why="node-b was lost", detect=0.9, wait=1.7),
            recovery(2, ended[2], kind="resize", why="node-b joins", detect=0.0, redo=0.0),
            recovery(3, ended[3], why=failure().sentence(), failure=failure().to_json()),
        ),
        "failure": FailureView(
            generation=3,
            wall=ended[3],
            sentence=failure().sentence(),
            cause=failure(),
            consequences=(
                failure(rank=0, node="node-a", message="a peer closed its connection", alive=True),
                failure(rank=2, node="node-c", message="a peer closed its connection", alive=True),
            ),
        ),
        "goodput": goodput(NOW - BEGAN),
        "samples": 1_908_192,
        "checkpoint": StoredView(wall=NOW - 95, step=19_400, seconds=1.2, size=3_200_000_000),
        "straggler_seconds": 41.0,
        "bad_steps": (
            bad_step(17_001, reason="the norm of the gradient is a spike", norm=51.25, loss=0.75),
            bad_step(17_312),
        ),
        "bad_steps_total": 2,
        "reported": {"loss": 0.378},
        "rates": tuple(
            (wall, int(part * 19_877), 5.1 + 0.4 * math.sin(part * 60) - (part % 0.2 < 0.008) * 4)
            for wall, part in curve()
        ),
        "metrics": {
            "loss": tuple(
                (wall, int(part * 19_877), 0.38 + 2.1 * math.exp(-5 * part) + 0.05 * math.sin(wall))
                for wall, part in curve()
            )
        },
    }
    given |= changes
    totals = reduce(RecoveryTotals.plus, given["recoveries"], RecoveryTotals())
    return JobView(**given, recovery_totals=totals)


def failed() -> JobView:
    """The same, ended by the failure."""
    return training(
        phase="ended",
        ended=NOW - 30,
        exitcode=1,
        rate=None,
        nodes={
            name: NodeView(name=name, state="ended", exitcode=1, last_seen=NOW - 30)
            for name in ("node-a", "node-b", "node-c")
        },
        history=(
            HistoryEntry(
                NOW - 30, "node-a ended with exit code 1", "the same failure came three times"
            ),
        ),
        stragglers=(),
    )


def hung() -> JobView:
    """Held up by a rank that did not come to a collective."""
    stack = '  File "train.py", line 34, in train_step\n    dist.all_reduce(loss)\n'
    reduce = hangs.Collective("ALLREDUCE", 180)
    activities = [
        hangs.RankActivity(
            rank=rank,
            node=f"node-{'ab'[rank // 2]}",
            step=90 - (rank == 3),
            waits=None if rank == 3 else reduce,
            launched=(hangs.Collective("ALLREDUCE", 179) if rank == 3 else reduce,),
            stack=stack,
        )
        for rank in range(4)
    ]
    return training(
        failure=FailureView(
            generation=3,
            wall=NOW - 60,
            sentence="rank 3 on node-b hangs at step 89",
            cause=failure(message="no step for 30 s", traceback="", exitcode=-9),
            hang=hangs.part(hangs.event_of(activities)),
        )
    )


def crowd(nodes: int = 512, workers: int = 8) -> JobView:
    """A big world; one node came late, one has a straggler, one was lost."""
    names = [f"node-{place:03}" for place in range(nodes)]
    worlds = worlds_of((names[:-1], names, names[:7] + names[8:], names), 980.0, workers)
    slow = events.Straggler(
        rank=100, seconds_per_step=0.3, usual=0.19, cost=9.0, text="rank 100 on node-012 is slow"
    )
    views = {name: NodeView(name=name, state="running", last_seen=NOW) for name in names}
    views["node-007"] = NodeView(name="node-007", state="lost", last_seen=NOW - 40)
    return training(
        nodes=views,
        size=nodes * workers,
        ranks=ranks_of(names, workers, 19_877),
        worlds=worlds,
        stragglers=(slow,),
    )


def many_worlds(count: int = 200, nodes: int = 40) -> JobView:
    """A job that changed again and again: every node was away for some worlds."""
    names = [f"node-{place:02}" for place in range(nodes)]
    members = [
        [name for place, name in enumerate(names) if (place * 7 + world) % 23]
        for world in range(count)
    ]
    worlds = worlds_of(members, (NOW - BEGAN - 40) / count)
    return training(
        generation=count - 1,
        worlds=worlds,
        recoveries=tuple(
            recovery(world.generation, world.ended)
            for world in worlds[-51:-1]
            if world.ended is not None
        ),
    )


def alone() -> JobView:
    """One node, one world, nothing has happened."""
    return training(
        nodes={"laptop": NodeView(name="laptop", state="running", leader=True, last_seen=NOW)},
        worlds=worlds_of((["laptop"],), 1.0),
        generation=0,
        size=2,
        min_nodes=1,
        max_nodes=1,
        restarts_used=0,
        recoveries=(),
        bad_steps=(),
        bad_steps_total=0,
        failure=None,
        stragglers=(),
        metrics={},
        ranks=ranks_of(("laptop",), 2, 640),
    )


def hostile(bad: str) -> JobView:
    """Every text that a user can choose is `bad`; names are told many times, and are cut."""
    name = bad[:10_000]
    cause = failure(node=name, message=bad, traceback=bad, collective=bad, hint=bad)
    after = failure(rank=0, node=name, message=bad, traceback=bad)
    worlds = worlds_of(([name, "node-a"], [name, name + "2"]), 800.0)
    hang = {
        "text": bad,
        "missing": [0],
        "ranks": [
            {
                "rank": 0,
                "node": name,
                "step": 1,
                "collective": bad,
                "missing": True,
                "stack": bad,
            }
        ],
    }
    slow = events.Straggler(rank=0, seconds_per_step=0.3, usual=0.2, cost=1.0, text=bad)
    return training(
        job=name,
        nodes={name: NodeView(name=name, state="running", last_seen=NOW)},
        ranks=(RankView(rank=0, node=name, step=1, rate=1.0),),
        stragglers=(slow,),
        worlds=worlds,
        history=(HistoryEntry(NOW, bad, bad),),
        recoveries=(recovery(0, BEGAN + 800, why=bad, kind=name, failure=cause.to_json()),),
        failure=FailureView(
            generation=0,
            wall=BEGAN + 800,
            sentence=bad,
            cause=cause,
            consequences=(after,),
            hang=hang,
        ),
        bad_steps=(bad_step(1, reason=bad, norm=name, action=name),),
        metrics={name: ((BEGAN + 50, 1, 1.0), (BEGAN + 80, 2, 0.5))},
        reported={name: None},
    )


def told(view: JobView, *, live: bool = True, text: str = "the job starts") -> dict[str, Any]:
    """The picture that the page is sent; `text` is in the last event."""
    node = next(iter(view.nodes))
    log = [
        {"wall": NOW - 40 + place, "node": node, "type": "joined", "text": "joined the job"}
        for place in range(30)
    ]
    log += [{"wall": NOW - 1, "node": node, "type": "world-formed", "text": text}]
    return {
        "now": NOW,
        "live": live,
        "node": node,
        "leader": node,
        "whole": True,
        "view": view.to_json(),
        "log": log,
    }
