"""`CheckpointStore`: checkpoints of a training at a path or a URL.

    store = CheckpointStore("s3://bucket/job-1", keep_last=3, every="auto")
    set_checkpoint_manager(store)                    # torchelastic.train does the rest

    if store.is_due(step, together=True):            # or, in a script of your own, on every rank
        store.save({"model": model.state_dict()}, step, together=True)

`save` copies the state to memory of its own and returns; a thread, or for a large state a process,
brings it to storage. While it does, the next ones are skipped, and the log says so. What is said to
be `lasting` is copied later still, until `before_write`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchelastic import env
from torchelastic.checkpoint import interval
from torchelastic.checkpoint.background.runner import Runner, Task
from torchelastic.checkpoint.background.take_fence import Turn
from torchelastic.checkpoint.catalog import Catalog
from torchelastic.checkpoint.fence import Fence
from torchelastic.checkpoint.file_system_checkpoint import FileSystemCheckpoint
from torchelastic.checkpoint.interval import Measured, Pace
from torchelastic.checkpoint.manager import CheckpointManager
from torchelastic.checkpoint.storage.storage import open_storage
from torchelastic.errors import CheckpointError, ConfigError
from torchelastic.system.memory_limit import NoRoom
from torchelastic.worker_counters import milestones, stalls

if TYPE_CHECKING:
    import torch

    from torchelastic.checkpoint.background.save_job import Job, Written
    from torchelastic.checkpoint.background.staging import Copying, Staging
    from torchelastic.checkpoint.background.writer_process import WriterProcess
    from torchelastic.checkpoint.write_plan import Content, Planner

log = logging.getLogger(__name__)

#: From this size on a process pays: it takes a second or two to start, once.
LARGE = 64 << 20


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read."""

    name: str
    #: Steps committed; 0 where whoever wrote it did not say.
    step: int
    #: What was given to `save`, and what was this rank's `own`.
    tree: Any
    own: Any


class CheckpointStore(CheckpointManager):
    """Checkpoints at `url`: a path, `file://`, or anything fsspec knows (`s3://`, `gs://`, ...).

    `keep_last` removes all but so many, `keep_every` spares those of every so many steps. `every`
    says when one `is_due`: a number of steps, a time (`"10m"`), or `"auto"`, as often as pays by
    what one costs and how often workers fail. `writer` is `"thread"`, `"process"`, or `"auto"`: a
    process for a large state. When ranks save together, rank 0 waits for `patience` seconds for
    the others. `storage_options` go to fsspec.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        every: int | str | None = None,
        writer: Literal["auto", "thread", "process"] = "auto",
        patience: float = 600.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_keep("keep_last", keep_last)
        _check_keep("keep_every", keep_every)
        if writer not in ("auto", "thread", "process"):
            raise ConfigError(f"writer is {writer!r}: it must be 'auto', 'thread' or 'process'.")
        self.url, self._options = os.fspath(url), dict(storage_options or {})
        #: Whether another process can be told of them.
        self._is_portable = _is_plain(self._options)
        if writer == "process" and not self._is_portable:
            raise ConfigError(
                "storage_options contains objects that cannot be passed to a writer process: use "
                "plain values, or writer='thread'."
            )
        self._keeping = {"keep_last": keep_last, "keep_every": keep_every}
        self.catalog = Catalog(open_storage(url, self._options), **self._keeping)
        self.every = interval.parse(every)
        self._writer, self._patience = writer, patience
        self._runner = Runner()
        self._planner: Planner | None = None
        self._stagings: list[Staging] = []
        #: What is being copied behind the training, unless that has turned out not to work here.
        self._copying: Copying | None = None
        self._at_once = False
        self._process: WriterProcess | None = None
        # The world this process writes for, and the number of its next checkpoint, if agreed on.
        self._turn: Turn | None = None
        self._sequence: int | None = None
        # When the next one is due.
        self._pace: Pace | None = None
        self._next_step = 0
        #: Of the last one; put here by the thread that writes, taken up by the one that trains.
        self._measured: Measured | None = None
        self._blocked = 0.0
        #: Seconds the last one took until it was in storage, and its step; None before the first.
        self.seconds: float | None = None
        self.saved_step: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # --- when ------------------------------------------------------------------------------------

    def is_due(self, step: int, *, together: bool = False) -> bool:
        """Whether `every` asks for a checkpoint of this step; with `together` all ranks agree.

        Times are then counted in steps, anew with each checkpoint: clocks differ.
        """
        if self.every is None:
            return False
        if self._pace is None:
            self._pace = Pace.begin(self.every, step - 1, time.monotonic())
        if self._measured is not None:
            self._pace = self._pace.learned(self._measured)
        if together and self.every.steps is None:
            return step >= self._next_step
        self._pace = self._pace.at(step)
        return self._pace.is_due(time.monotonic())

    def entered(self, generation: int, base: int) -> None:
        """A world begins, from `base` steps; called on the rank that is going to save.

        Whoever wrote here for an earlier world writes nothing more, and what it has stored of
        later steps is void.
        """
        if self.saved_step is not None and self.saved_step > base:
            self.saved_step = None  # void
        self._turn, self._sequence = Turn(self.catalog, _new_fence(generation), base), None
        self._turn.begin()

    # --- saving ----------------------------------------------------------------------------------

    def save(
        self,
        tree: Any,
        step: int,
        *,
        own: Any = None,
        generation: int | None = None,
        together: bool = False,
        lasting: Collection[torch.Tensor] = (),
    ) -> bool:
        """Begin a checkpoint of `tree`, which has committed `step` steps. False if it is skipped.

        `tree` is made of dicts, lists, tuples, tensors and plain values, and may be changed once
        this returns; but those of its tensors that are `lasting` only after `before_write`. With
        `together` all ranks of the default process group call this, each with its shards (DTensors)
        of a tree that is the same otherwise, and with what is its `own`; without, this process
        writes all of it.
        """
        from torchelastic.checkpoint import rank_agreement
        from torchelastic.checkpoint.background.save_job import Job
        from torchelastic.checkpoint.write_plan import Planner, by_address

        began = time.monotonic()
        rank, size = rank_agreement.world() if together else (0, 1)
        if self._planner is None:
            self._planner = Planner()
        content = self._planner.content(tree, own, rank=rank, size=size)
        if not self._may_begin(step, content.bytes, together):
            return False
        if (turn := self._take_turn(generation, together)) is None:
            return False
        plan, slots, number = content.plan, content.slots, self._next_number()
        job = Job(step, rank, size, plan, slots, turn.fence, number, self._patience)
        # A large one never waits for its turn: its copy begins at once.
        behind = content.bytes >= LARGE and bool(lasting) and not self._at_once
        staged = self._copy(content, step, by_address(lasting) if behind else None)
        if staged is None:
            self._write_at_once(job, turn, content)
        else:
            self._put(job, turn, *staged, self._way(content.bytes))
            self._copying = staged[1]
        if not behind:
            self._copy_rest()
        self._began(step, began)
        return True

    def before_write(self) -> None:
        """Wait until all is copied, and help: what was saved is about to be written to."""
        if self._copying is not None:
            began = time.monotonic()
            self._copy_rest()
            self._stood(time.monotonic() - began)

    def _copy_rest(self) -> None:
        copying = self._copying
        if copying is not None:
            copying.run()
            if self._copying is copying:  # no other thread has begun another one
                self._copying = None

    def _stood(self, seconds: float) -> None:
        """The training thread has waited for this checkpoint."""
        self._blocked += seconds
        stalls.add("checkpoint", seconds)

    def wait(self) -> None:
        """Wait until everything saved is in storage, or has failed to get there."""
        self._runner.wait()

    def finish(self) -> None:
        """`wait`, and raise if the last one could not be written."""
        self._runner.finish()

    def close(self) -> None:
        """Wait for what is being written, then give back the memory and the process."""
        self._runner.wait()
        if self._process is not None:
            self._process.close()
        for staging in self._stagings:
            staging.close()
        self._process, self._stagings = None, []

    def _may_begin(self, step: int, size: int, together: bool) -> bool:
        """Whether it can be written, or wait for its turn.

        Waiting takes memory for another copy, which a large state is not given; and what waits may
        be dropped for a newer one, which ranks that save together would each do in their own time.
        """
        busy = self._runner.is_busy
        if together:
            from torchelastic.checkpoint import rank_agreement

            anyone, self._next_step = rank_agreement.largest(busy, self._step_after(step))
            busy = bool(anyone)
        skipped = busy and (together or size >= LARGE)
        if skipped:
            log.warning(
                "Skipped the checkpoint of step %d: the one before is still being written to %s.",
                step,
                self.url,
            )
        return not skipped

    def _copy(
        self, content: Content, step: int, lasting: Mapping[int, torch.Tensor] | None
    ) -> tuple[Staging, Copying] | None:
        """Into memory that is free; None, and a word in the log, where there is none to be had."""
        staging = self._free_memory(step)
        try:
            slots, size = content.slots, content.room
            return staging, staging.copy(content.tensors, slots, size, lasting)
        except (NoRoom, OSError, MemoryError) as error:
            staging.release()
            log.warning(
                "Training waits until the checkpoint of step %d is written: %s", step, error
            )
            return None

    def _free_memory(self, step: int) -> Staging:
        from torchelastic.checkpoint.background.staging import Staging

        self._runner.make_way(step)
        free = [one for one in self._stagings if not one.in_use]
        if not free:
            free = [Staging()]
            self._stagings += free
        free[0].in_use = True
        return free[0]

    def _step_after(self, step: int) -> int:
        """Of which step the next is to be, as this rank sees it."""
        pace = self._pace
        if pace is None or step <= pace.step:
            return step + 1
        pace_of_steps = (time.monotonic() - pace.last) / (step - pace.step)
        return step + max(1, round(pace.seconds / max(pace_of_steps, 1e-6)))

    def _next_number(self) -> int | None:
        """Of a checkpoint that others write with us, whatever becomes of our part."""
        number = self._sequence
        if number is not None:
            self._sequence = number + 1
        return number

    def _take_turn(self, generation: int | None, together: bool) -> Turn | None:
        """This world's; with others, the same for all, and the number of the checkpoint with it."""
        if generation is None:
            generation = int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)
        if self._turn is None or self._turn.fence.generation != generation:
            self._turn, self._sequence = Turn(self.catalog, _new_fence(generation)), None
        if together and self._sequence is None and not self._agree_on_names(self._turn):
            return None
        return self._turn  # which may be another one now

    def _agree_on_names(self, turn: Turn) -> bool:
        """Once in a world: rank 0's fence is everybody's, and so is its next number."""
        from torchelastic.checkpoint import rank_agreement

        told: dict[str, Any] = {}
        if rank_agreement.world()[0] == 0:
            try:
                told = {"token": turn.fence.token, "sequence": self.catalog.next_sequence()}
            except Exception as error:  # of any storage; the others wait for an answer
                told = {"error": repr(error)}
        told = rank_agreement.of_rank_0(told)
        if "error" in told:
            log.error("Skipped a checkpoint: could not list %s (%s).", self.url, told["error"])
            return False
        self._sequence = int(told["sequence"])
        if told["token"] != turn.fence.token:
            self._turn = Turn(self.catalog, replace(turn.fence, token=str(told["token"])))
        return True

    def _way(self, size: int) -> Callable[[Job, int], Written]:
        """How what is in a memory is written: by this process, or by another."""
        process = self._writer == "process" or (self._writer == "auto" and size >= LARGE)
        process = process and self._is_portable
        if process and not self.catalog.storage.is_private:
            from torchelastic.checkpoint.background.writer_process import WriterProcess

            if self._process is None:
                self._process = WriterProcess(self.url, self._options, self._keeping)
            return self._process.run
        from torchelastic.checkpoint.background.save_job import run
        from torchelastic.checkpoint.background.staging import staged

        return lambda job, memory: run(job, self.catalog, staged(memory, job.slots))

    def _put(
        self,
        job: Job,
        turn: Turn,
        staging: Staging,
        copying: Copying,
        write: Callable[[Job, int], Written],
    ) -> None:
        def task() -> None:
            self._finish_copy(job, copying)
            self._write(job, turn, lambda job: write(job, staging.descriptor))

        self._runner.put(Task(job.step, task, staging.release))

    def _write_at_once(self, job: Job, turn: Turn, content: Content) -> None:
        """From where it lies, while the training waits: better than no checkpoint at all."""
        from torchelastic.checkpoint.background.save_job import run

        def write(job: Job) -> Written:
            return run(job, self.catalog, content.tensors)

        self._runner.put(Task(job.step, lambda: self._write(job, turn, write)))
        self._runner.wait()

    def _write(self, job: Job, turn: Turn, write: Callable[[Job], Written]) -> None:
        """In the thread."""
        if job.rank == 0:
            turn.ensure()
        shipper = replace(job, history=turn.history())
        self._note(shipper, write(shipper))

    def _finish_copy(self, job: Job, copying: Copying) -> None:
        """In the thread; raises if there is nothing that could be written."""
        from torchelastic.checkpoint.background.save_job import give_up

        try:
            copying.result()
        except CheckpointError as error:
            self._at_once |= copying.is_disturbed
            give_up(job, self.catalog, str(error))
            raise

    def _began(self, step: int, began: float) -> None:
        now = time.monotonic()
        self._blocked = 0.0
        self._stood(now - began)  # and `before_write` adds to it
        if self.every is not None:
            self._pace = (self._pace or Pace.begin(self.every, step, now)).began(step, now)

    def _note(self, job: Job, written: Written) -> None:
        """It is written: how long that took tells when the next is due. Rank 0 tells the user."""
        self.seconds = written.seconds
        seen = job.history
        self._measured = Measured(self._blocked, written.seconds, seen.seconds, seen.ended)
        if job.rank != 0:
            return
        self.saved_step = job.step
        milestones.checkpoint_stored(job.step, written.seconds, written.size)
        log.info(
            "Wrote checkpoint %s of step %d (%.1f MB) in %.2f s; training waited %.3f s.",
            written.name,
            job.step,
            written.size / 1e6,
            written.seconds,
            self._blocked,
        )
        if self.every is not None and self.every.auto:
            log.info(
                "The next checkpoint is due in %.0f s: one costs %.3f s of training, and the mean "
                "time between failures is %.0f s.",
                interval.automatic(self._measured),
                self._measured.cost,
                interval.between_failures(seen.seconds, seen.ended),
            )

    # --- loading ---------------------------------------------------------------------------------

    def load(self, like: Any = None, *, together: bool = False, beyond: int = -1) -> Loaded | None:
        """Read the newest that is whole; None where there is none of a step `beyond` this one.

        Torn, corrupt and void ones are told and passed over. Where `like`, a tree as given to
        `save`, has DTensors, this rank's shards are read; everything else is read in full. (`like`
        may be a function: it is given what is stored, by name, and returns the DTensors by name.)
        With `together` all ranks read what rank 0 finds.
        """
        from torchelastic.checkpoint import rank_agreement

        if not together:
            found, rank = self._newest(beyond), 0
        else:
            rank = rank_agreement.world()[0]
            found = self._newest_of_rank_0(rank, beyond)
        return None if found is None else self._read(*found, like, rank)

    def _newest(self, beyond: int) -> tuple[str, int] | None:
        record = next(self.catalog.sound(beyond), None)
        return None if record is None else (record.name, record.step or 0)

    def _newest_of_rank_0(self, rank: int, beyond: int) -> tuple[str, int] | None:
        from torchelastic.checkpoint import rank_agreement

        told: dict[str, Any] = {}
        if rank == 0:
            try:
                told = {"found": self._newest(beyond)}
            except Exception as error:  # of any storage; the others wait for an answer
                told = {"error": repr(error)}
        told = rank_agreement.of_rank_0(told)
        if "error" in told:
            raise CheckpointError(f"Could not read the checkpoints at {self.url}: {told['error']}.")
        return None if told["found"] is None else (str(told["found"][0]), int(told["found"][1]))

    def _read(self, name: str, step: int, like: Any, rank: int) -> Loaded:
        from torchelastic.checkpoint.storage import dcp_files

        try:
            tree, own = dcp_files.read(self.catalog.storage, name, like, rank=rank)
        except Exception as error:
            raise CheckpointError(
                f"Could not load checkpoint {self.url}/{name}, though its checksums match "
                f"({error!r}): remove it to continue from the one before."
            ) from error
        return Loaded(name, step, tree, own)

    # --- 0.1: streams ----------------------------------------------------------------------------

    def create_checkpoint(self) -> FileSystemCheckpoint:
        return FileSystemCheckpoint.new(self.catalog)

    def get_checkpoint(self, sequence_id: int) -> FileSystemCheckpoint | None:
        found = (one for one in self.list_checkpoints() if one.sequence_id == sequence_id)
        return next(found, None)

    def get_latest_checkpoint(self) -> FileSystemCheckpoint | None:
        record = next(self.catalog.records(), None)
        return None if record is None else FileSystemCheckpoint(self.catalog, record)

    def list_checkpoints(self) -> list[FileSystemCheckpoint]:
        return [FileSystemCheckpoint(self.catalog, record) for record in self.catalog.records()]


class FileSystemCheckpointManager(CheckpointStore):
    """0.1's name of a store in a directory, which is made if it is not there."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        every: int | str | None = None,
    ) -> None:
        self.directory = Path(checkpoint_dir)
        self.directory.mkdir(parents=True, exist_ok=True)
        super().__init__(checkpoint_dir, keep_last=keep_last, every=every)


def _new_fence(generation: int) -> Fence:
    run, start = env.get("TORCHELASTIC_RUN_ID"), env.get("TORCHELASTIC_START")
    return Fence(secrets.token_hex(3), run, start, generation)


def _is_plain(options: Mapping[str, Any]) -> bool:
    try:
        json.dumps(options)
    except (TypeError, ValueError):
        return False
    return True


def _check_keep(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}: it must be at least 1, or None to keep all.")
