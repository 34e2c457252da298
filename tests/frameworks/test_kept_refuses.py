"""Refusals of a framework's Keep: models whose shards look replicated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchelastic.errors import ConfigError

FSDP1 = "FSDP1 shards the state over ranks in plain tensors.*use FSDP2"


@pytest.mark.needs("lightning")
def test_lightning():
    from lightning.pytorch import strategies

    from torchelastic.integrations import lightning

    with pytest.raises(ConfigError, match=f"a model of FSDPStrategy: {FSDP1}"):
        lightning._refuse_other_strategies(strategies.FSDPStrategy())
    with pytest.raises(TypeError, match="Keep does not support object"):
        lightning._refuse_other_strategies(object())
    for strategy in (strategies.DDPStrategy(), strategies.ModelParallelStrategy()):
        lightning._refuse_other_strategies(strategy)


@pytest.mark.parametrize(
    ("kind", "is_fsdp2", "said"),
    [
        ("FSDP", True, ""),
        ("MULTI_CPU", False, ""),
        ("FSDP", False, FSDP1),
        ("DEEPSPEED", False, "DeepSpeed's own save_checkpoint"),
        ("MEGATRON_LM", False, "Keep does not support MEGATRON_LM"),
    ],
)
@pytest.mark.needs("accelerate")
def test_accelerate(kind, is_fsdp2, said):
    from accelerate import utils

    from torchelastic.integrations.accelerate import refuse_other_shards

    given = SimpleNamespace(distributed_type=utils.DistributedType[kind], is_fsdp2=is_fsdp2)
    if not said:
        refuse_other_shards(given)
        return
    with pytest.raises((ConfigError, TypeError), match=said):
        refuse_other_shards(given)
