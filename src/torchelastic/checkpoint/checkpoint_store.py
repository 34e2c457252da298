"""`CheckpointStore`: checkpoints at a path or a URL.

    store = CheckpointStore("s3://bucket/job-1", keep_last=3, every="auto")
    set_checkpoint_manager(store)                    # torchelastic.train does the rest

    if store.is_due(step, together=True):            # or, in a script of your own, on every rank
        store.save({"model": model.state_dict()}, step, together=True)

`save` copies the state to separate memory and returns; a thread, or for a large state a process,
writes it to storage. Checkpoints that are due meanwhile are skipped with a warning. Tensors in
`lasting` may be copied later, until `before_write`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchelastic import env
from torchelastic.checkpoint import interval
from torchelastic.checkpoint.catalog import Catalog, FenceClaim, Fenced
from torchelastic.checkpoint.fence import Fence
from torchelastic.checkpoint.interval import CheckpointSchedule, Every, Measured
from torchelastic.checkpoint.manager import CheckpointManager
from torchelastic.checkpoint.runner import Runner, Task
from torchelastic.checkpoint.storage.storage import open_storage
from torchelastic.checkpoint.stored_checkpoint import FileSystemCheckpoint
from torchelastic.errors import CheckpointError, ConfigError
from torchelastic.system.memory_limit import NoRoom
from torchelastic.worker_counters import milestones, stalls

if TYPE_CHECKING:
    import torch

    from torchelastic.checkpoint.save_job import Job, Written
    from torchelastic.checkpoint.staging import Staging
    from torchelastic.checkpoint.write_plan import Content, Planner
    from torchelastic.checkpoint.writer_process import WriterProcess
    from torchelastic.tensors.tensor_bytes import BackgroundCopy

log = logging.getLogger(__name__)

#: From this size on a writer process is worth its start-up time of a second or two.
LARGE = 64 << 20


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read."""

    name: str
    #: Steps committed; 0 if unknown.
    step: int
    #: The arguments `tree` and `own` of `save`.
    tree: Any
    own: Any


class CheckpointStore(CheckpointManager):
    """Checkpoints at `url`: a path, `file://`, or any URL of fsspec (`s3://`, `gs://`, ...).

    `keep_last` is the number of checkpoints to keep; `keep_every` also keeps those of every n-th
    step. `every` is the interval for `is_due`: a number of steps, a time (`"10m"`), or `"auto"`,
    computed from the cost of a checkpoint and the failure rate. `writer` is `"thread"`,
    `"process"`, or `"auto"`: a process for a large state. When ranks save together, rank 0 waits
    `patience` seconds for the others. `storage_options` are passed to fsspec.
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
        #: The options can be passed to another process.
        self._is_portable = _is_plain(self._options)
        if writer == "process" and not self._is_portable:
            raise ConfigError(
                "storage_options contains objects that cannot be passed to a writer process: use "
                "plain values, or writer='thread'."
            )
        self._retention = {"keep_last": keep_last, "keep_every": keep_every}
        self.catalog = Catalog(open_storage(url, self._options), **self._retention)
        self.every = interval.parse(every)
        self._writer, self._patience = writer, patience
        self._runner = Runner(self.url)
        self._planner: Planner | None = None
        self._stagings: list[Staging] = []
        #: The copy in progress during training; `_at_once`: that does not work with this script.
        self._copying: BackgroundCopy | None = None
        self._at_once = False
        self._process: WriterProcess | None = None
        # The claim of this world to write, and the number of its next checkpoint, if agreed on.
        self._claim: FenceClaim | None = None
        #: The generation that this process trains in, as far as it was told.
        self._world = -1
        self._sequence: int | None = None
        # For the next checkpoint.
        self._pace: CheckpointSchedule | None = None
        self._paced_in = -1
        self._next_step = 0
        #: This rank's part of the last checkpoint that ranks wrote together.
        self._part: Job | None = None
        #: Of the last one; set by the writer thread, read by the training thread.
        self._measured: Measured | None = None
        self._blocked = 0.0
        #: Seconds that writing the last one took, and its step; None before the first.
        self.seconds: float | None = None
        self.saved_step: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # --- when ------------------------------------------------------------------------------------

    def is_due(self, step: int, *, together: bool = False) -> bool:
        """Return True if a checkpoint of this step is due.

        With `together`, call it on all ranks: all get the same answer. Clocks differ, so times are
        converted to steps at each checkpoint; and processes of a world are not equally old, so the
        first call of a generation is collective if `every` is a time.
        """
        if self.every is None:
            return False
        generation = _generation()
        if self._pace is None or generation != self._paced_in:
            self._pace, self._paced_in = self._schedule(self.every, step, together), generation
        if self._measured is not None:
            self._pace = self._pace.learned(self._measured)
        if together and self.every.steps is None:
            return step >= self._next_step
        self._pace = self._pace.at(step)
        return self._pace.is_due(time.monotonic())

    def _schedule(self, every: Every, step: int, together: bool) -> CheckpointSchedule:
        """Return the schedule of a generation whose first step is this one.

        It counts steps from there on, whatever this process has counted before.
        """
        now = time.monotonic()
        if together and every.steps is None:
            from torchelastic.tensors import agreement

            (planned,) = agreement.largest(self._next_step)
            self._next_step = planned or step + 1  # when the time of a step is known
            return CheckpointSchedule.begin(every, step, now)
        if self._pace is None:
            return CheckpointSchedule.begin(every, step - 1, now)
        return self._pace.back_at(step - 1)

    def entered(self, generation: int, base: int, *, saves: bool = True) -> None:
        """Note that a world begins from `base` steps, and whether this rank will save.

        Writers of earlier worlds cannot write any more, and their checkpoints of later steps are
        void.
        """
        self._world = generation
        if not saves:
            return
        if self.saved_step is not None and self.saved_step > base:
            self.saved_step = None  # void
        self._claim, self._sequence = FenceClaim(self.catalog, _new_fence(generation), base), None
        self._claim.begin()

    def lost(self, ranks: Collection[int]) -> None:
        """Note that these ranks, which saved together with this one, are gone: rank 0 does not wait
        for parts that they have not written."""
        if self._part is None or self._part.rank != 0 or not self._runner.is_busy:
            return
        thread = threading.Thread(  # storage may be hung
            target=self._give_up_parts,
            args=(self._part, ranks),
            name="torchelastic-storage",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._tell_waiting(self._part, ranks, error)

    def _give_up_parts(self, job: Job, ranks: Collection[int]) -> None:
        from torchelastic.checkpoint.save_job import give_up_parts

        try:
            give_up_parts(job, self.catalog, ranks, "its worker was lost")
        except Exception as error:  # of any storage
            self._tell_waiting(job, ranks, error)

    def _tell_waiting(self, job: Job, ranks: Collection[int], error: Exception) -> None:
        log.warning(
            "The checkpoint of step %d waits up to %.0f s for ranks %s, which were lost: could not "
            "write to %s (%r).",
            job.step,
            job.patience,
            ", ".join(map(str, ranks)),
            self.url,
            error,
        )

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
        hashed: bool = False,
    ) -> bool:
        """Start a checkpoint of `tree`, which has committed `step` steps. False if it is skipped.

        `tree` consists of dicts, lists, tuples, tensors and plain values. It may change once this
        returns, except tensors in `lasting`, which may change only after `before_write`. With
        `together` all ranks of the default process group call this, each with its shards (DTensors)
        of a tree that is otherwise the same, and with its `own` part; without it, this process
        writes the whole tree. With `hashed`, the hash of the copy's "model" is reported.
        """
        from torchelastic.checkpoint.save_job import Job
        from torchelastic.checkpoint.write_plan import Planner, by_address

        began = time.monotonic()
        rank, size = _place() if together else (0, 1)
        if self._planner is None:
            self._planner = Planner()
        content = self._planner.content(tree, own, rank=rank, size=size)
        self._renew_claim(_generation() if generation is None else generation)
        if not self._may_begin(step, content.bytes, together):
            return False
        claim = self._claim  # `_may_begin` may have replaced it
        assert claim is not None
        plan, slots, number = content.plan, content.slots, self._next_number()
        job = Job(step, rank, size, plan, slots, claim.fence, number, self._patience)
        self._part = job if together else None
        # A large one never waits for another: its copy begins at once.
        behind = content.bytes >= LARGE and bool(lasting) and not self._at_once
        staged = self._copy(content, step, by_address(lasting) if behind else None)
        if staged is None:
            self._write_at_once(job, claim, content, hashed=hashed)
        else:
            self._put(job, claim, *staged, self._way(content.bytes), hashed=hashed)
            self._copying = staged[1]
        if not behind:
            self._copy_rest()
        self._began(step, began)
        return True

    def before_write(self) -> None:
        """Finish the copy: the saved tensors are about to change."""
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
        """Count seconds that the training thread waited for this checkpoint."""
        self._blocked += seconds
        stalls.add("checkpoint", seconds)

    def wait(self) -> None:
        """Wait until everything saved is in storage or has failed."""
        self._runner.wait()

    def finish(self) -> None:
        """`wait`, and raise if the last one could not be written. One that was dropped because its
        world ended, while this process trains in a later one, is no failure."""
        try:
            self._runner.finish()
        except CheckpointError as error:
            why = error.__cause__
            if not (isinstance(why, Fenced) and why.generation < self._world):
                raise

    def close(self) -> None:
        """Wait for the checkpoint being written, then free the memory and end the process."""
        self._runner.wait()
        if self._process is not None:
            self._process.close()
        for staging in self._stagings:
            staging.close()
        self._process, self._stagings = None, []

    def _may_begin(self, step: int, size: int, together: bool) -> bool:
        """Return True if it can be written now, or may wait for the one before.

        A large state may not wait, because that takes memory for another copy. Neither may ranks
        that save together: each could drop the waiting one for a newer one at another time.
        """
        busy, is_named = self._runner.is_busy, True
        if together:
            from torchelastic.tensors import agreement

            anyone, self._next_step, is_unnamed = agreement.largest(
                busy, self._step_after(step), self._sequence is None
            )
            busy, is_named = bool(anyone), not is_unnamed
        skipped = busy and (together or size >= LARGE)
        if skipped:
            log.warning(
                "Skipped the checkpoint of step %d: the one before is still being written to %s.",
                step,
                self.url,
            )
        return not skipped and (is_named or self._agree_on_names())

    def _copy(
        self, content: Content, step: int, lasting: Mapping[int, torch.Tensor] | None
    ) -> tuple[Staging, BackgroundCopy] | None:
        """Copy into free memory; None, with a warning, if there is not enough memory."""
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
        from torchelastic.checkpoint.staging import Staging

        self._runner.make_way(step)
        free = [one for one in self._stagings if not one.in_use]
        if not free:
            free = [Staging()]
            self._stagings += free
        free[0].in_use = True
        return free[0]

    def _step_after(self, step: int) -> int:
        """Return the step of the next checkpoint, from this rank's view."""
        pace = self._pace
        if pace is None or step <= pace.step:
            return step + 1
        pace_of_steps = (time.monotonic() - pace.last) / (step - pace.step)
        return step + max(1, round(pace.seconds / max(pace_of_steps, 1e-6)))

    def _next_number(self) -> int | None:
        """Take the number of a checkpoint that ranks write together, even if our part fails."""
        number = self._sequence
        if number is not None:
            self._sequence = number + 1
        return number

    def _renew_claim(self, generation: int) -> None:
        """Claim the fence anew in another generation."""
        if self._claim is None or self._claim.fence.generation != generation:
            self._claim, self._sequence = FenceClaim(self.catalog, _new_fence(generation)), None

    def _agree_on_names(self) -> bool:
        """Use rank 0's fence token and next number on all ranks. Once in a world, when a rank has
        none."""
        from torchelastic.tensors import agreement

        claim = self._claim
        assert claim is not None
        told: dict[str, Any] = {}
        if _place()[0] == 0:
            try:
                told = {"token": claim.fence.token, "sequence": self.catalog.next_sequence()}
            except Exception as error:  # of any storage; the others wait for an answer
                told = {"error": repr(error)}
        told = agreement.of_rank_0(told)
        if "error" in told:
            log.error("Skipped a checkpoint: could not list %s (%s).", self.url, told["error"])
            return False
        self._sequence = int(told["sequence"])
        if told["token"] != claim.fence.token:
            self._claim = FenceClaim(self.catalog, replace(claim.fence, token=str(told["token"])))
        return True

    def _way(self, size: int) -> Callable[[Job, int], Written]:
        """Return the function that writes a copied state: in this process, or in another."""
        process = self._writer == "process" or (self._writer == "auto" and size >= LARGE)
        process = process and self._is_portable
        if process and not self.catalog.storage.is_private:
            from torchelastic.checkpoint.writer_process import WriterProcess

            if self._process is None:
                self._process = WriterProcess(self.url, self._options, self._retention)
            return self._process.run
        from torchelastic.checkpoint.save_job import run
        from torchelastic.checkpoint.staging import staged

        return lambda job, memory: run(job, self.catalog, staged(memory, job.slots))

    def _put(
        self,
        job: Job,
        claim: FenceClaim,
        staging: Staging,
        copying: BackgroundCopy,
        write: Callable[[Job, int], Written],
        *,
        hashed: bool,
    ) -> None:
        from torchelastic.checkpoint.staging import staged

        def task() -> None:
            self._finish_copy(job, copying)
            self._write(job, claim, lambda job: write(job, staging.descriptor))
            if hashed:
                _hash(job.step, staged(staging.descriptor, job.slots))

        self._runner.put(Task(job.step, task, staging.release))

    def _write_at_once(
        self, job: Job, claim: FenceClaim, content: Content, *, hashed: bool
    ) -> None:
        """Write without a copy, while training waits: better than no checkpoint."""
        from torchelastic.checkpoint.save_job import run

        def write(job: Job) -> Written:
            return run(job, self.catalog, content.tensors)

        self._runner.put(Task(job.step, lambda: self._write(job, claim, write)))
        self._runner.wait()
        if hashed:
            _hash(job.step, content.tensors)

    def _write(self, job: Job, claim: FenceClaim, write: Callable[[Job], Written]) -> None:
        """Runs in the writer thread."""
        if job.rank == 0:
            claim.ensure()
        job = replace(job, history=claim.history())
        self._note(job, write(job))

    def _finish_copy(self, job: Job, copying: BackgroundCopy) -> None:
        """Runs in the writer thread; raises if the copy is unusable."""
        from torchelastic.checkpoint.save_job import give_up

        copying.run()
        if copying.error is None and not copying.is_disturbed:
            return
        wrong = f"could not copy the state ({copying.error!r})"
        if copying.error is None:
            self._at_once = True
            wrong = (
                "parameters or optimizer state changed before optimizer.step while they were being "
                "copied; from now on training waits for the copy"
            )
        give_up(job, self.catalog, wrong)
        raise CheckpointError(wrong)

    def _began(self, step: int, began: float) -> None:
        now = time.monotonic()
        self._blocked = 0.0
        self._stood(now - began)  # and `before_write` adds to it
        if self.every is not None:
            self._pace = (self._pace or CheckpointSchedule.begin(self.every, step, now)).began(
                step, now
            )

    def _note(self, job: Job, written: Written) -> None:
        """Record a written checkpoint: its cost decides when the next is due. Rank 0 logs it."""
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

    def load(
        self, like: Any = None, *, together: bool = False, beyond: int = -1
    ) -> LoadedCheckpoint | None:
        """Read the newest valid checkpoint; None if there is none of a step after `beyond`.

        Torn, corrupt and void ones are logged and skipped. Where `like`, a tree as passed to
        `save`, has DTensors, only this rank's shards are read; everything else is read in full.
        (`like` may be a function: it gets the stored tensors' metadata by name and returns DTensors
        by name.) With `together` all ranks read the checkpoint that rank 0 finds.
        """
        if not together:
            found, rank = self._newest(beyond), 0
        else:
            rank = _place()[0]
            found = self._newest_of_rank_0(rank, beyond)
        return None if found is None else self._read(*found, like, rank)

    def _newest(self, beyond: int) -> tuple[str, int] | None:
        record = next(self.catalog.sound(beyond), None)
        if record is not None:
            return record.name, record.step or 0
        if beyond < 0 and self.catalog.skipped:
            log.warning("No checkpoint at %s can be used: none is loaded.", self.url)
        return None

    def _newest_of_rank_0(self, rank: int, beyond: int) -> tuple[str, int] | None:
        from torchelastic.tensors import agreement

        told: dict[str, Any] = {}
        if rank == 0:
            try:
                told = {"found": self._newest(beyond)}
            except Exception as error:  # of any storage; the others wait for an answer
                told = {"error": repr(error)}
        told = agreement.of_rank_0(told)
        if "error" in told:
            raise CheckpointError(f"Could not read the checkpoints at {self.url}: {told['error']}.")
        return None if told["found"] is None else (str(told["found"][0]), int(told["found"][1]))

    def _read(self, name: str, step: int, like: Any, rank: int) -> LoadedCheckpoint:
        from torchelastic.checkpoint.storage import dcp_files

        try:
            tree, own = dcp_files.read(self.catalog.storage, name, like, rank=rank)
        except Exception as error:
            raise CheckpointError(
                f"Could not load checkpoint {self.url}/{name}, though its checksums match "
                f"({error!r}): remove it to continue from the one before."
            ) from error
        return LoadedCheckpoint(name, step, tree, own)

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
    """0.1's name for a store in a directory, which is created if necessary."""

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


def _hash(step: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Report the hash of a checkpoint's "model", whose tensors have these names."""
    from torchelastic.tensors.tensor_bytes import sha256_of

    named = {name: one for name, one in tensors.items() if name.startswith("model.")}
    milestones.weights_hashed(
        step, sha256_of({name.removeprefix("model."): one for name, one in named.items()})
    )


def _generation() -> int:
    """Return the generation that this process is in."""
    return int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _new_fence(generation: int) -> Fence:
    run, start = env.get("TORCHELASTIC_RUN_ID"), env.get("TORCHELASTIC_START")
    return Fence(secrets.token_hex(3), run, start, generation)


def _place() -> tuple[int, int]:
    """Return rank and size of the ranks that save together."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "together=True needs a process group: call torch.distributed.init_process_group "
            "first, or leave out together=True."
        )
    return dist.get_rank(), dist.get_world_size()


def _is_plain(options: Mapping[str, Any]) -> bool:
    try:
        json.dumps(options)
    except (TypeError, ValueError):
        return False
    return True


def _check_keep(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}: it must be at least 1, or None to keep all.")
