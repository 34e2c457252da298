"""ImageNet with a hand-written State: `sync`, `snapshot`, `apply`, `save` and `load`.

Under an agent:

    torchelastic run --nproc-per-node 2 examples/imagenet/main.py /path/to/imagenet

Without one, start any number of processes on any machines. They meet at RDZV_ENDPOINT: an etcd
(`host:2379`), or one of the machines (`tcp://host:29400`):

    SIZE=2 MIN_SIZE=1 RDZV_ENDPOINT=tcp://localhost:29400 JOB_ID=1 python examples/imagenet/main.py

Without a directory of images, some are generated. If torchvision is installed, its ResNet-18 and
its image loader are used; otherwise a small ResNet with generated images only.
`TorchState` does everything that `ImagenetState` does: see `train_lm.py`.
"""

import argparse
import io
import os
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchelastic
import torchelastic.distributed as edist
from torchelastic import checkpoint
from torchelastic.p2p import CoordinatorP2P
from torchelastic.utils.data import ElasticDistributedSampler

try:
    import torchvision
except ImportError:
    torchvision = None


class ImagenetState(torchelastic.State):
    """The model, the optimizer, and how far in which epoch.

    All workers build the same one; what they learn after that they share in `sync`.
    """

    def __init__(self, dataset, args):
        torch.manual_seed(0)
        self.dataset = dataset
        self.args = args
        self.model = make_model(dataset.classes)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4
        )
        self.epoch = 0
        #: Samples of this epoch that all workers together have had.
        self.position = 0
        #: Steps done: who has done most has the freshest state.
        self.steps = 0
        # Of one world only: made in `sync`.
        self.ddp = None
        self.batches = None

    def sync(self):
        """All take over the freshest state; then what belongs to a world is made anew."""
        source, most = edist.all_gather_return_max_long(self.steps)
        _, most_behind = edist.all_gather_return_max_long(-self.steps)
        # In the first world all are equal, after a failure nearly all: then nothing is sent.
        if -most_behind != most:
            self.receive_from(source)
        self.ddp = DistributedDataParallel(self.model)
        self.batches = self.load_data()

    def receive_from(self, source):
        saved = io.BytesIO()
        if dist.get_rank() == source:
            self.save(saved)
        content = edist.broadcast_binary(
            numpy.frombuffer(saved.getbuffer(), numpy.uint8), src_rank=source
        )
        if dist.get_rank() != source:
            self.load(io.BytesIO(content.tobytes()))

    def load_data(self):
        """The batches left of this epoch, for this worker."""
        sampler = ElasticDistributedSampler(self.dataset, start_index=self.position)
        sampler.set_epoch(self.epoch)
        loader = DataLoader(self.dataset, batch_size=self.args.batch_size, sampler=sampler)
        return iter(loader)

    def begin_epoch(self):
        self.epoch += 1
        self.position = 0
        self.batches = self.load_data()

    def snapshot(self):
        """A copy: what is not copied goes on changing. Called before each step."""
        return {
            "model": cloned(self.model.state_dict()),
            "optimizer": cloned(self.optimizer.state_dict()),
            "epoch": self.epoch,
            "position": self.position,
            "steps": self.steps,
        }

    def apply(self, snapshot):
        """`sync` comes next, and makes batches that fit the position."""
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(cloned(snapshot["optimizer"]))
        self.epoch = snapshot["epoch"]
        self.position = snapshot["position"]
        self.steps = snapshot["steps"]

    def save(self, stream):
        torch.save(self.snapshot(), stream)

    def load(self, stream):
        """Of tensors and plain values only: what peers or files hold can run no code here."""
        self.apply(torch.load(stream, weights_only=True))

    def should_save_checkpoint(self, rank):
        return self.steps % self.args.checkpoint_every == 0


def train_step(state):
    batch = next(state.batches, None)
    if batch is None:
        if state.epoch + 1 == state.args.epochs:
            raise StopIteration
        state.begin_epoch()
        batch = next(state.batches)
    images, labels = batch

    loss = nn.functional.cross_entropy(state.ddp(images), labels)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.position = min(len(state.dataset), state.position + len(labels) * dist.get_world_size())
    state.steps += 1

    if dist.get_rank() == 0 and state.steps % state.args.tell_every == 0:
        done = 100 * state.position / len(state.dataset)
        print(
            f"epoch {state.epoch} ({done:3.0f} %)  step {state.steps}  loss {loss.item():.4f}  "
            f"workers {dist.get_world_size()}",
            flush=True,
        )


def cloned(tree):
    """A copy of nested dicts and lists of tensors that shares nothing with them."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: cloned(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(cloned(item) for item in tree)
    return tree


# --- data and model ------------------------------------------------------------------------------


class GeneratedImages(Dataset):
    """Stripes in as many directions as there are classes, under noise."""

    def __init__(self, size=2048, classes=8, width=32):
        self.classes = [f"direction {number}" for number in range(classes)]
        self.size = size
        self.width = width

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        label = index % len(self.classes)
        angle = torch.tensor(torch.pi * label / len(self.classes))
        places = torch.arange(self.width)
        stripes = (places[None] * angle.cos() + places[:, None] * angle.sin()).sin()
        noise = torch.randn(
            3, self.width, self.width, generator=torch.Generator().manual_seed(index)
        )
        return stripes + noise, label


def make_dataset(directory):
    if directory is None:
        return GeneratedImages()
    if torchvision is None:
        raise SystemExit("To read images, install torchvision; without a directory some are made.")
    transforms = torchvision.transforms
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    prepare = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    return torchvision.datasets.ImageFolder(
        directory / "train", transforms.Compose([*prepare, transforms.ToTensor(), normalize])
    )


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.around = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.around(x))


def make_model(classes):
    if torchvision is not None:
        return torchvision.models.resnet18(num_classes=len(classes))
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        Residual(16, 16, stride=1),
        Residual(16, 32, stride=2),
        Residual(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, len(classes)),
    )


# --- main ----------------------------------------------------------------------------------------


def make_coordinator():
    """From the agent if there is one, else from the variables that 0.1's example has."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return CoordinatorP2P()
    size = os.environ.get("SIZE", "1")
    smallest = int(os.environ.get("MIN_SIZE", size))
    largest = int(os.environ.get("MAX_SIZE", size))
    endpoint = os.environ.get("RDZV_ENDPOINT", "localhost:2379")
    job = os.environ.get("JOB_ID", "imagenet")
    where = endpoint if "://" in endpoint else f"etcd://{endpoint}"
    return CoordinatorP2P(
        c10d_backend="gloo",
        init_method=f"{where}/{job}?min_workers={smallest}&max_workers={largest}",
        max_num_trainers=largest,
        process_group_timeout=60000,
    )


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", type=Path, help="directory with train/CLASS/IMAGE")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="for each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--tell-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--checkpoints", type=Path, metavar="DIRECTORY")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.checkpoints:
        manager = checkpoint.FileSystemCheckpointManager(args.checkpoints, keep_last=2)
        checkpoint.set_checkpoint_manager(manager)
    state = ImagenetState(make_dataset(args.data), args)
    torchelastic.train(make_coordinator(), train_step, state)
    print(f"done after {state.steps} steps", flush=True)


if __name__ == "__main__":
    main()
