"""The workload in the state / train_step form: its workers outlive their generations."""

import os
import time

import torch
import workload
from workload import StepLog

import torchelastic
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session


def main() -> None:
    arguments = workload.parser(__doc__).parse_args()
    until = time.monotonic() + arguments.seconds
    torch.manual_seed(int(os.environ["RANK"]))
    log = StepLog(arguments.record)
    model, optimizer = workload.build(arguments.size)
    state = torchelastic.TorchState(model=model, optimizer=optimizer)

    def train_step(state: torchelastic.TorchState) -> None:
        began = time.monotonic()
        if began > until or (arguments.steps and state.step >= arguments.steps):
            raise StopIteration
        workload.take_step(state.model, state.optimizer, arguments)
        world = session.current()
        log.in_world(world.generation, world.rank, world.size, world.generation)
        log.step(state.step + 1, began, collectives=world.group.launched)

    torchelastic.train(CoordinatorP2P(), train_step, state)


if __name__ == "__main__":
    main()
