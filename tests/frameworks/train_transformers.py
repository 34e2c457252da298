"""Hugging Face Trainer: a tiny GPT-2 made from its configuration, resumed by Trainer itself.

python train_transformers.py
torchrun --nproc-per-node 2 train_transformers.py
"""

import argparse
import time
from pathlib import Path

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


class Counting(Dataset):
    """Sequences that count up from a random number."""

    def __init__(self, size=1600, length=16):
        starts = torch.randint(32, (size, 1), generator=torch.Generator().manual_seed(0))
        self.rows = (starts + torch.arange(length)) % 32

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Report(TrainerCallback):
    def __init__(self, step_seconds=0.0):
        self.step_seconds = step_seconds

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            print(f"[rank {args.process_index}] resumed at step {state.global_step}")

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.step_seconds)

    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.6f}")


def last_checkpoint(out):
    """The newest one that is whole: Trainer writes `trainer_state.json` after everything else."""
    whole = [path.parent for path in out.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pretend to be larger")
    args = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            save_steps=args.save_every,
            save_total_limit=2,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Counting(),
        callbacks=[Report(args.step_seconds)],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.out))
    if trainer.is_world_process_zero():
        print(f"finished at step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
