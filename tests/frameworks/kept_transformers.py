"""The Trainer with Keep: a tiny GPT-2 with dropout."""

import kept
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
        kept.goes_on(state.global_step)


class Mortal(Trainer):
    orders = keep = None

    def training_step(self, *args, **kwargs):
        if self.orders is not None:
            kept.trains(self.orders, self.state.global_step, self.keep)
        return super().training_step(*args, **kwargs)


def train(args, keeps):
    set_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 64, "n_layer": 1, "n_head": 2}
    more = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": args.fsdp}} if args.fsdp else {}
    options = TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )
    if args.fsdp:
        assert options.device.type == "cpu"  # setting it up resets the types
        kept.fsdp_plugin(args.fsdp)
    trainer = Mortal(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        args=options,
        train_dataset=Counting(args.samples),
    )
    if keeps:
        trainer.orders = args
        trainer.add_callback(Report())
        trainer.keep = Keep(trainer)
    torch.manual_seed(kept.RANK)
    trainer.train()
    return trainer.state.global_step, trainer.state.epoch, trainer.model, trainer.optimizer


if __name__ == "__main__":
    kept.run(train, kept.parser().parse_args())
