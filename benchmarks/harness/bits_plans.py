"""What happens in a run of `bits.py`, from its seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

MODELS = ("transformer", "transformer-bf16", "convolution", "lstm", "sparse", "gan")
#: Sharded over replicas of two workers, in `train`: a part of its runs.
SHARDED, REPLICA, PART_SHARDED = "transformer-sharded", 2, 0.2
COUNTS = (8, 12, 16)
#: Workers at most.
MOST = 6
#: Seconds that a step sleeps, on all workers that there are at the start.
STEP = 0.1
#: Faults to a worker; to a node. As often as they are listed.
TO_WORKERS = ("kill", "kill", "kill", "kill-two", "freeze", "freeze-until-replaced")
TO_NODES = ("kill-node", "leave", "leave", "join", "join", "freeze-node", "freeze-node-for-long")
#: Where workers kill themselves, in addition.
PLACES = {
    "train": (
        "group.build",
        "sync.begin",
        "sync.end",
        "micro_batch.begin",
        "micro_batch.begin,n=2",
        "collective.before,n=2",
        "collective.launched,n=2",
        "collective.launched,n=4",
        "collective.after",
        "optimizer.before",
        "step.end",
        "checkpoint.write",
    ),
    "keep": (
        "micro_batch.begin",
        "micro_batch.begin,n=2",
        "snapshot.begun",
        "snapshot.copy",
        "snapshot.sealing",
        "checkpoint.write",
    ),
}


@dataclass(frozen=True)
class Fault:
    kind: str
    #: Which worker or node, counted through all there are.
    target: int
    #: Seconds after the job has continued from the fault before; without waiting for that if hasty.
    delay: float
    is_hasty: bool
    #: Seconds that a frozen process sleeps, if nobody replaces it.
    freeze: float


@dataclass(frozen=True)
class Plan:
    seed: int
    mode: str
    model: str
    count: int
    #: Workers of each node at the start, and of each one that joins.
    nodes: tuple[int, ...]
    joining: int
    backend: str
    has_witness: bool
    #: The limit of a step, in seconds; 0: none.
    limit: float
    keys: dict[str, str | int | float]
    #: The plan of `torchelastic.faults`.
    places: str
    faults: tuple[Fault, ...]

    @property
    def reference(self) -> tuple[str, int]:
        """Runs of one have the same weights."""
        return self.model, self.count


def plan(seed: int) -> Plan:
    rng = random.Random(seed)
    mode = "train" if rng.random() < 0.65 else "keep"
    nodes = rng.choice([(1,), (2,), (3,), (4,), (5,), (6,), *_SEVERAL, *_SEVERAL])
    kinds = [*TO_WORKERS] if len(nodes) == 1 else [*TO_WORKERS, *TO_NODES, *TO_NODES]
    if sum(nodes) < MOST and len(nodes) == 1:
        kinds += ["join", "join", "leave"]
    faults = tuple(
        Fault(
            kind=rng.choice(kinds),
            target=rng.randrange(60),
            delay=rng.random() * 0.4,
            is_hasty=rng.random() < 0.25,
            freeze=0.05 + rng.random() * 0.6,
        )
        for _ in range(rng.randint(2, 5))
    )
    keys: dict[str, str | int | float] = {
        "every": rng.choice([0, 2, 3, 5]),
        "evaluate": rng.choice([0, 0, 3, 5]),
        "loaders": rng.choice([0, 0, 1, 2]),
        "measure": rng.choice([4, 16]),
        "shares": rng.choice(["speed", "speed", "equal"]),
    }
    count = rng.choice(COUNTS)
    keys["wait"] = round(STEP * sum(nodes) / count, 4)
    if rng.random() < 0.4:
        keys["slow"] = str(rng.randrange(3))
        keys["slowness"] = rng.choice([2.0, 3.0, 5.0])
    places = ""
    if rng.random() < 0.35:
        place, step, generation = rng.choice(PLACES[mode]), rng.randint(1, 6), rng.randint(0, 1)
        if place.startswith(("group", "sync")):
            step, generation = 0, 1
        where = f"place={place},generation={generation}"
        places = f"kill@rank={rng.randrange(max(2, sum(nodes)))},{where}"
        if step:
            places += f",step={step}"
    model, joining = rng.choice(MODELS), rng.randint(1, 2)
    backend = "etcd" if rng.random() < 0.2 else "c10d"
    has_witness = rng.random() < 0.5
    if mode == "train" and rng.random() < PART_SHARDED:
        model, joining, nodes = SHARDED, REPLICA, rng.choice(_OF_REPLICAS)
        keys["wait"] = round(STEP * sum(nodes) / REPLICA / count, 4)
    return Plan(
        seed=seed,
        mode=mode,
        model=model,
        count=count,
        nodes=nodes,
        joining=joining,
        backend=backend,
        has_witness=has_witness,
        limit=1.5 if any(one.kind == "freeze-until-replaced" for one in faults) else 0.0,
        keys=keys,
        places=places,
        faults=faults,
    )


_OF_REPLICAS = ((2,), (4,), (6,), (2, 2), (2, 2), (4, 2), (2, 2, 2))
_SEVERAL = ((1, 1), (2, 1), (1, 1, 1), (2, 1, 1), (2, 2), (2, 2, 2), (1, 1, 1, 1), (1, 2, 2))
