"""The Trainer with Keep: a tiny GPT-2 with dropout, and a line per rank at its end.

The tests start it with `--die rank:step`: that rank is killed in its first life when so many steps
are done, in the batch after them.
"""

import argparse
import hashlib
import os
import signal

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from torchelastic.integrations.transformers import Keep

RANK = int(os.environ["RANK"])
FIRST_LIFE = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class Counting(Dataset):
    """Sequences that count up from a random number."""

    def __init__(self, size, length=8):
        starts = torch.randint(32, (size, 1), generator=torch.Generator().manual_seed(0))
        self.rows = (starts + torch.arange(length)) % 32

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Report(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        print(f"[rank {RANK}] goes on from step {state.global_step}")


class Mortal(Trainer):
    die = ""

    def training_step(self, *args, **kwargs):
        if FIRST_LIFE and self.die == f"{RANK}:{self.state.global_step}":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)


def fingerprint(trainer):
    digest = hashlib.sha256()
    tensors = [*trainer.model.state_dict().values(), torch.get_rng_state()]
    for entries in trainer.optimizer.state.values():
        tensors.extend(entries.values())
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--die", default="")
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 64, "n_layer": 1, "n_head": 2}
    trainer = Mortal(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        args=TrainingArguments(
            output_dir=args.out,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Counting(args.samples),
        callbacks=[Report()],
    )
    trainer.die = args.die
    Keep(trainer)
    torch.manual_seed(RANK)
    trainer.train()
    print(
        f"[rank {RANK}] ends at step {trainer.state.global_step} "
        f"epoch {trainer.state.epoch:g} with {fingerprint(trainer)}"
    )


if __name__ == "__main__":
    main()
