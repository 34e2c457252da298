"""A worker that keeps a counter in its agent's memory: `holding.py LINES ORDERS [size=BYTES]`.

Imports no torch. At its start it tells what its node holds. Then it does as it is told by files in
ORDERS, named `GENERATION-RANK`: `commit STEP` (each once), `fetch PIECE GENERATION STEP PEER`,
`die`, `finish`.
"""

import os
import signal
import sys
import time
from functools import partial
from itertools import count

from worker_side import GENERATION, HERE, KEYS, ORDERS, RANK, SIZE, write

from torchelastic.snapshot import layout, messages
from torchelastic.snapshot.layout import SHARED, Memory, own
from torchelastic.worker import channel

size = int(KEYS.get("size", "10000"))
tell = partial(write, **HERE)
link = channel.link()
assert link is not None
numbers = count(1)


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
    version = (GENERATION, step)
    for piece, memory in written.items():
        data = content(piece, step)
        memory.begin(version)[:size] = data
        summed = layout.checksum(data)
        memory.seal(version, b"{}", size, summed, rank=RANK, size=SIZE)
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
pieces = [own(RANK)] if os.environ["LOCAL_RANK"] != "0" else [SHARED, own(RANK)]
written = {piece: memory for piece in pieces if (memory := room(piece)) is not None}
tell("ready")
done: set[str] = set()
while True:
    for path in sorted(ORDERS.glob(f"{GENERATION}-{RANK}*")):
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
