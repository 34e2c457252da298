"""A worker that keeps a counter in its agent's memory: `holding.py LINES ORDERS [BYTES]`. No torch.

At its start it tells what its node holds. Then it does as it is told by files in ORDERS, named
`GENERATION-RANK`: `commit STEP` (each once), `fetch PIECE GENERATION STEP PEER`, `die`, `finish`.
"""

import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

from torchelastic.snapshot import layout, messages
from torchelastic.snapshot.layout import SHARED, Memory, own
from torchelastic.worker import channel

lines, orders = map(Path, sys.argv[1:3])
size = int(sys.argv[3]) if len(sys.argv) > 3 else 10_000
generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
out = open(lines / f"{generation}-{rank}-{os.getpid()}", "a", buffering=1)  # noqa: SIM115
link = channel.link()
assert link is not None
numbers = count(1)


def tell(event: str, **more: object) -> None:
    place = {"generation": generation, "rank": rank, "world_size": world_size, "pid": os.getpid()}
    out.write(json.dumps({"event": event, **place, **more}) + "\n")


def ask(request: messages.Request) -> tuple[messages.Answer, int | None]:
    link.tell(messages.to_json(request))
    received = link.receive()
    assert received is not None
    answer = messages.from_json(received[0])
    assert isinstance(answer, messages.Answer)
    assert answer.request == request.request
    return answer, received[1]


def room(piece: str) -> Memory | None:
    answer, descriptor = ask(messages.Room(next(numbers), piece, size, 100))
    if isinstance(answer, messages.Refused):
        tell("refused", sentence=answer.sentence)
        return None
    assert descriptor is not None
    return Memory(descriptor)


def content(piece: str, step: int) -> bytes:
    return (f"{piece} {step} ".encode() * size)[:size]


def commit(step: int) -> None:
    version = (generation, step)
    for piece, memory in written.items():
        data = content(piece, step)
        memory.begin(version)[:size] = data
        summed = layout.checksum(data)
        memory.seal(version, b"{}", size, summed, rank=rank, size=world_size)
        channel.send(messages.to_json(messages.Sealed(piece, version)))
    tell("committed", step=step)


def fetch(piece: str, of: int, step: int, peer: str) -> None:
    answer, descriptor = ask(messages.Fetch(next(numbers), piece, (of, step), peer))
    if isinstance(answer, messages.Refused):
        tell("fetched", refused=answer.sentence)
        return
    assert descriptor is not None
    held = Memory(descriptor, writable=False).find((of, step))
    right = held is not None and held.is_whole() and held.data == content(piece, step)
    tell("fetched", piece=piece, right=right)


def inventory() -> None:
    answer, _ = ask(messages.Inventory(next(numbers)))
    assert isinstance(answer, messages.NodeInventory)
    held = [[item.piece, *item.version, item.replica] for item in answer.holdings]
    tell("inventory", held=sorted(held), peer=answer.peer)


tell("start")
inventory()
pieces = [own(rank)] if os.environ["LOCAL_RANK"] != "0" else [SHARED, own(rank)]
written = {piece: memory for piece in pieces if (memory := room(piece)) is not None}
tell("ready")
done: set[str] = set()
while True:
    for path in sorted(orders.glob(f"{generation}-{rank}*")):
        if path.name in done or path.suffix == ".part":
            continue
        done.add(path.name)
        what, *words = path.read_text().split()
        if what == "commit":
            commit(int(words[0]))
        elif what == "fetch":
            fetch(words[0], int(words[1]), int(words[2]), words[3])
        elif what == "inventory":
            inventory()
        elif what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "finish":
            sys.exit(0)
    time.sleep(0.01)
