"""One run in TensorBoard, MLflow or Weights & Biases, however often the job is restarted.

    torchelastic run --nproc-per-node 2 examples/trackers.py --tracker tensorboard --mode keep

Modes: `run` (own checkpoint), `keep` (`TorchState` in a script) and `train` (`torchelastic.train`).
Kill any of its processes while it runs: the tracker shows each step once.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchelastic
from torchelastic.p2p import CoordinatorP2P

RUN_ID = os.environ["TORCHELASTIC_RUN_ID"]


class Tracker:
    """Rank 0 writes; a new rank 0 continues the same run."""

    run, turns = None, 0

    def log(self, recent, wait=0):
        """Write those of the last (step, loss) pairs that the tracker does not have yet.

        A new rank 0 begins after `wait` calls: by then the previous one has closed the run.
        """
        self.turns = self.turns + 1 if int(os.environ["RANK"]) == 0 else 0
        if self.turns == 0:
            self.close()
        elif recent and self.turns > wait:
            if self.run is None:
                self.run, self.last = self.open(recent[0][0])
            for step, loss in recent:
                if step > self.last:
                    self.write(step, loss)
                    self.last = step

    def close(self):
        if self.run is not None:
            self.end()
            self.run = None


class TensorBoard(Tracker):
    def open(self, first):
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard reads files in the order of the seconds in their names: begin a new second.
        seconds = [int(file.name.split(".")[3]) for file in Path(f"runs/{RUN_ID}").glob("events.*")]
        time.sleep(max(0, max(seconds, default=0) + 1 - time.time()))
        # Hide all values from step `first` on: they are written again.
        return SummaryWriter(f"runs/{RUN_ID}", purge_step=first), first - 1

    def write(self, step, loss):
        self.run.add_scalar("loss", loss, step)
        self.run.flush()

    def end(self):
        self.run.close()


class MLflow(Tracker):
    def open(self, first):
        import mlflow

        self.client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment("my-project").experiment_id
        same = f"tags.torchelastic_run_id = '{RUN_ID}'"
        found = self.client.search_runs([experiment], same)
        tags = {"torchelastic_run_id": RUN_ID}
        run = found[0] if found else self.client.create_run(experiment, tags=tags, run_name=RUN_ID)
        self.client.update_run(run.info.run_id, status="RUNNING")
        logged = self.client.get_metric_history(run.info.run_id, "loss")
        return run.info.run_id, max((value.step for value in logged), default=-1)

    def write(self, step, loss):
        self.client.log_metric(self.run, "loss", loss, step=step)

    def end(self):
        self.client.set_terminated(self.run)


class WandB(Tracker):
    def open(self, first):
        import wandb

        run = wandb.init(project="my-project", id=RUN_ID, resume="allow")
        return run, run.step - 1  # what the server has; -1 offline

    def write(self, step, loss):
        self.run.log({"loss": loss}, step=step)

    def end(self):
        self.run.finish()


def loss_of(model, step):
    rank = int(os.environ["RANK"])
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 1000 + rank))
    time.sleep(0.02)  # an accelerator would be busy now
    return nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True).sin())


def mean(loss):
    """The mean over all ranks: the state must be the same on all of them."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def run(tracker, model, optimizer, steps):
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    path = Path("checkpoint.pt")
    recent, step = [], 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        recent, step = saved["recent"], saved["step"]
    tracker.log(recent)
    while step < steps:
        loss = loss_of(ddp, step)
        recent = [*recent[-99:], (step, mean(loss))]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.log(recent)
        step += 1
        if step % 10 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "recent": recent, "step": step}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    del ddp  # or it holds the group, which torch 2.13 may then deadlock in freeing
    dist.destroy_process_group()


def keep(tracker, model, optimizer, steps):
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    kept = torchelastic.TorchState(model=ddp, optimizer=optimizer, recent=[])
    kept.restore()
    tracker.log(kept.recent)
    while kept.step < steps:
        loss = loss_of(ddp, kept.step)
        kept.recent = [*kept.recent[-99:], (kept.step, mean(loss))]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.commit()
        tracker.log(kept.recent)
    del ddp, kept  # or they hold the group, which torch 2.13 may then deadlock in freeing
    dist.destroy_process_group()


def train(tracker, model, optimizer, steps):
    state = torchelastic.TorchState(model=model, optimizer=optimizer, recent=[])

    def train_step(state):
        # The steps that are committed; this process may be the new rank 0.
        tracker.log(state.recent, wait=10)
        if state.step == steps:
            raise StopIteration
        loss = loss_of(state.model, state.step)
        state.recent = [*state.recent[-99:], (state.step, mean(loss))]
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()

    torchelastic.train(CoordinatorP2P(), train_step, state)
    tracker.log(state.recent)


def main():
    trackers = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
    modes = {"run": run, "keep": keep, "train": train}
    parser = argparse.ArgumentParser()
    parser.add_argument("--tracker", choices=trackers, default="tensorboard")
    parser.add_argument("--mode", choices=modes, default="keep")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tracker = trackers[args.tracker]()
    modes[args.mode](tracker, model, optimizer, args.steps)
    tracker.close()


if __name__ == "__main__":
    main()
