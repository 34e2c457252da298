"""The tests' part of `kept_*.py`: what they are told, when they die, and what they say.

In its first life a script trains twice: without Keep, as the measure, and with it.
"""

import argparse
import hashlib
import os
import signal
import time

import torch

from torchelastic.snapshot.writer import ShardStatus

RANK = int(os.environ["RANK"])
LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--out", default="out")
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--samples", type=int, default=96)
    made.add_argument("--accumulate", type=int, default=1)
    made.add_argument("--fsdp", type=int, default=0, help="shard with this version of FSDP")
    made.add_argument("--pace", type=float, default=0.0, help="seconds in a batch")
    made.add_argument(
        "--die",
        nargs="*",
        default=[],
        help="one for each life, RANK:STEP or RANK:STEP:validation: that rank is killed when so "
        "many steps are done, in the batch (or the validation) after them",
    )
    return made


def run(train, args):
    torch.set_num_threads(1)
    if LIFE == 0 and args.die:
        _say("without Keep ends", *train(args, keeps=False))
    step, epoch, model, optimizer = train(args, keeps=True)
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    assert sharded == bool(args.fsdp)
    _say("ends", step, epoch, model, optimizer)


def _say(how, step, epoch, *state):
    print(f"[rank {RANK}] {how} at step {step} epoch {epoch:g} with {_digest(*state)}")


def goes_on(step):
    print(f"[rank {RANK}] goes on from step {step}")


def validates(args, step):
    _die(args, f"{RANK}:{step}:validation")
    print(f"[rank {RANK}] validates after step {step}")


def trains(args, step, keep):
    """Wait until the shards of the last step are kept: until then, commits keep none."""
    writer = keep._state._keeper._writer
    while writer.shard_status() is ShardStatus.PENDING:
        time.sleep(0.005)
    _die(args, f"{RANK}:{step}")


def _die(args, here):
    if here in args.die[LIFE : LIFE + 1]:
        os.kill(os.getpid(), signal.SIGKILL)


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _digest(model, optimizer):
    """Of the model, its buffers, the optimizer and the random state."""
    digest = hashlib.sha256()
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for entries in optimizer.state.values():
        tensors.extend(entries.values())
    for tensor in tensors:
        digest.update(_whole(tensor.detach()).numpy().tobytes())
    return digest.hexdigest()[:16]


def fsdp_plugin(version):
    """Accelerate's plugin, and its types as with GPUs: without any it ignores the plugin."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    if state.distributed_type is not DistributedType.FSDP:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap")
