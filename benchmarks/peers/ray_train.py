"""The workload under Ray Train: DDP on gloo, a checkpoint every 10 steps."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

EVERY = 10


def train(config: dict[str, Any]) -> None:
    """The training function of one worker."""
    import ray.train
    import ray.train.torch
    import torch
    import workload
    from torch import distributed

    directory = Path(config["directory"])
    words = [f"--record={directory / 'logs'}", f"--checkpoint={directory / 'none'}"]
    arguments = workload.parser(None).parse_args(words)
    context = ray.train.get_context()
    model, optimizer = workload.build(arguments.size)
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as name:
            step = workload.load(Path(name) / "checkpoint.pt", model, optimizer)
    model = ray.train.torch.prepare_model(model)
    world = torch.tensor([time.monotonic_ns()])
    distributed.broadcast(world, 0)
    log = workload.StepLog(arguments.record)
    size = context.get_world_size()
    log.in_world(int(world), context.get_world_rank(), size, 0)
    until = time.monotonic() + arguments.seconds
    while time.monotonic() < until:
        began = time.monotonic()
        workload.take_step(model, optimizer, arguments)
        step += 1
        log.step(step, began)
        if step % EVERY == 0:
            with tempfile.TemporaryDirectory() as name:
                checkpoint = None
                if context.get_world_rank() == 0:
                    bare = getattr(model, "module", model)
                    workload.save(Path(name) / "checkpoint.pt", bare, optimizer, step)
                    checkpoint = ray.train.Checkpoint.from_directory(name)
                ray.train.report({"step": step}, checkpoint=checkpoint)
