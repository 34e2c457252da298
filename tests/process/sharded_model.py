"""A small model that can be sharded in many ways, for `sharded.py` and `native_hsdp.py`.

Keys: layout (fsdp, tensor, both), size (of a replica), steps, batch, micro (microbatches of a step,
all but the last without reduction), mixed (bf16 or fp16), recompute, frozen, reshard (0: parameters
stay whole between forward and backward), plain (a parameter that FSDP2 does not manage), clip,
twice (a second optimizer), hold (gradients accumulate over so many steps before one writes),
scaled (a GradScaler whose first scale is too large: the first step is skipped), large (elements of
a large parameter), dropout, schedule (the learning rate decays after each step), counted (a large
buffer counts the forwards).
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """Two layers that can be split over workers."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 28), nn.Linear(28, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, and a parameter beside them."""

    def __init__(
        self, *, recompute: bool, large: int = 5, dropout: bool = False, counted: bool = False
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.register_buffer("forwards", torch.zeros(20_000 if counted else 0))
        self.blocks = nn.ModuleList([Block(recompute=recompute) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(large))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        for block in self.blocks:
            x = block(x)
        if self.dropout:
            x = nn.functional.dropout(x, 0.1)
        return x * self.scale.sum()


class Training:
    """A model, its optimizers, and a step."""

    def __init__(self, keys: dict[str, str]) -> None:
        self.keys = keys
        self.layout = keys.get("layout", "fsdp")
        self.size, self.steps = int(keys.get("size", "2")), int(keys.get("steps", "12"))
        self.micro = int(keys.get("micro", "1"))
        #: What the loss is multiplied by.
        self.factor = 1.0
        self.batch = int(keys.get("batch", "8")) * self.micro
        torch.set_num_threads(1)
        torch.manual_seed(5)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh of a replica."""
        if self.layout == "both":
            return {"shard": self.size // 2, "tensor": 2}
        return {"tensor" if self.layout == "tensor" else "shard": self.size}

    def build(self, tensor: Any, data: Any) -> None:
        """Build the model, split over one mesh and sharded over the other."""
        keys = self.keys
        self.model: Any = Model(
            recompute="recompute" in keys,
            large=int(keys.get("large", "5")),
            dropout="dropout" in keys,
            counted="counted" in keys,
        )
        if "frozen" in keys:
            self.model.blocks[0].requires_grad_(False)
        if tensor is not None:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in self.model.blocks:
                parallelize_module(block, tensor, plan, src_data_rank=None)
        if data is not None:
            options = {"mesh": data, "reshard_after_forward": keys.get("reshard") != "0"}
            if dtype := DTYPES.get(keys.get("mixed", "")):
                options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
            for block in self.model.blocks:
                fully_shard(block, **options)
            apart = {self.model.scale} if "plain" in keys else set()
            fully_shard(self.model, **options, ignored_params=apart)
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        parts = [self.trained[::2], self.trained[1::2]] if "twice" in keys else [self.trained]
        self.optimizers = [torch.optim.AdamW(part, lr=0.01) for part in parts]
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(one, 0.9)
            for one in (self.optimizers if "schedule" in keys else ())
        ]
        # Not a scale at which only native HSDP overflows, which divides a part of it afterwards.
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**17, backoff_factor=2.0**-8, enabled="scaled" in keys
        )

    def step(
        self, taken: list[int], weight: float, before_write=lambda: None, number: int = 0
    ) -> None:
        hold = int(self.keys.get("hold", "1"))
        for optimizer in self.optimizers if number % hold == 0 else ():
            optimizer.zero_grad()
        for turn in range(self.micro):
            if self.micro > 1 and self.layout != "tensor":
                self.model.set_requires_gradient_sync(turn == self.micro - 1)
            part = inputs(taken[turn :: self.micro])
            loss = self.model(part).float().square().mean() * weight / self.micro
            loss = loss * self.factor
            self.scaler.scale(loss).backward()
        before_write()
        if "clip" in self.keys:
            for part in by_mesh(self.trained):
                nn.utils.clip_grad_norm_(part, 0.1)
        for optimizer in self.optimizers if number % hold == hold - 1 else ():
            self.scaler.step(optimizer)
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()

    def shards(self) -> list[torch.Tensor]:
        return [
            (one.to_local() if hasattr(one, "to_local") else one).detach()
            for one in self.model.parameters()
        ]

    def fingerprint(self) -> str:
        counted = self.model.forwards[:1].tolist()
        digest = hashlib.sha256(f"{self.scaler.get_scale()} {counted}".encode())
        for shard in self.shards():
            digest.update(shard.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def by_mesh(parameters: list[Any]) -> list[list[Any]]:
    """The parameters by their meshes: a norm of one mesh and another is not defined."""
    found: dict[Any, list[Any]] = {}
    for one in parameters:
        found.setdefault(getattr(one, "device_mesh", None), []).append(one)
    return list(found.values())


def inputs(taken: list[int]) -> torch.Tensor:
    rows = [torch.randn(16, generator=torch.Generator().manual_seed(one)) for one in taken]
    return torch.stack(rows) if rows else torch.zeros(1, 16)
