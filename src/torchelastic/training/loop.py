"""The training loop of an in-process worker: enter a world, take steps, recover from failures.

    the agent says:  Enter ──▶ store, group, versions, checkpoint, sync ──▶ step, step, step ...
                       ▲                                                     │ the gate: stop here
                       │       an exception, anywhere: `outcome` says what ──┤
                       └──── roll back, report, leave the group, wait ◀──────┘

Steps are counted from 0 over the whole job. A state with n steps, the last one committed in
generation g, has the version (g, n). When workers enter generation g, `sync` gives all of them the
freshest state that any of them has; if its version is (f, n), they then call it (g, n). (A sharded
state keeps its version until its next step: `state.base_of`.) A state
that was rolled back has the version of its rollback point. So with `snapshot_every=k` a failed step
undoes up to k - 1 committed steps, and all workers repeat them in the next world. The repeated
steps belong to a later generation, so their versions are fresher than the undone ones.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

from torchelastic import checkpoint, faults
from torchelastic.errors import (
    EXIT_FAILED,
    EXIT_SIGNAL_BASE,
    ChannelLost,
    CheckpointError,
    ConfigError,
    JobClosed,
    NonRetryableException,
    StopException,
)
from torchelastic.tensors.module_state import form_number
from torchelastic.training import compatibility, session, stored_state
from torchelastic.training.control import Control, InProcessRequests
from torchelastic.training.coordinator import Coordinator, CoordinatorP2P, overrides
from torchelastic.training.gate import Gate, GateDecision
from torchelastic.training.group.group import GenerationOver, Group, enter
from torchelastic.training.outcome import (
    Action,
    AnotherWorld,
    Kind,
    Where,
    chain,
    decide,
    kind_of,
)
from torchelastic.training.recovery import StateRecovery
from torchelastic.training.session import Session
from torchelastic.training.sharded import mesh
from torchelastic.training.state import FIRST, TORN, State, Torn, Version, call_sync
from torchelastic.training.state_checks import NONE, StateChecks
from torchelastic.training.step_guard import why_it_ends
from torchelastic.worker import bootstrap, error_file, optimizer_steps
from torchelastic.worker.leaving import leaving, left_to_agent
from torchelastic.worker.orders import (
    Begins,
    Checked,
    Enlisted,
    Enter,
    Erred,
    Finished,
    Leave,
    Over,
    PeerLost,
    Stopped,
    Unfit,
    Up,
)
from torchelastic.worker.status_page import StatusPage
from torchelastic.worker_counters import stalls

log = logging.getLogger(__name__)

#: Seconds between two looks at a lease that has ended.
LEASE_POLL_INTERVAL = 0.05
#: The kinds of errors reported to the coordinator.
_TOLD = (Kind.USER, Kind.FATAL, Kind.UNFIT, Kind.OTHER_BITS, Kind.PEER_LOST)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one `train` call."""

    #: Call the state's `snapshot` every this many steps.
    snapshot_every: int = 1
    #: Write a checkpoint every this many steps, and whenever the state asks for one.
    checkpoint_every: int | None = None
    #: Retry this many errors of user code in this process; the count restarts when training gets
    #: past its furthest step.
    max_failures: int = 100

    def __post_init__(self) -> None:
        for name in ("snapshot_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1 step, not {value}.")
        if self.max_failures < 0:
            raise ConfigError(f"max_failures must be 0 or more, not {self.max_failures}.")


class Steps(Protocol):
    """The user's steps, taken one at a time."""

    def restart(self, state: State) -> None:
        """Start over with a synchronised state."""

    def run(self, state: State) -> tuple[State, Any]:
        """Take a step; return the new state and statistics. StopIteration: no more data."""


class _RollbackPoint(NamedTuple):
    """The result of `State.snapshot`, and the state's version at that time."""

    version: Version
    content: Any


class Loop:
    """One call of `train`."""

    def __init__(self, control: Control, coordinator: CoordinatorP2P, options: Options) -> None:
        self._control = control
        self._coordinator = coordinator
        self._options = options
        self._version: Version = FIRST
        self._group: Group | None = None
        #: The rank in the last world entered; -1 before the first.
        self._rank = -1
        self._where = Where.BUILD
        #: The rollback point, and whether the state is unusable where there is none.
        self._rollback: _RollbackPoint | None = None
        self._half_written = False
        #: The furthest step committed, and the errors of user code since.
        self._furthest = 0
        self._failures = 0
        self._last_error: BaseException | None = None
        #: The number of steps after which the coordinator ended the training.
        self._last_step: float = math.inf

    def run(self, steps: Steps, state: State) -> State:
        """Train until done; return the state, which a step may have replaced."""
        self._steps, self._state = steps, state
        self._version = state._begins_at()
        optimizer_steps.stop()  # from now on `train` counts steps
        replica = mesh.current()
        self._control.tell(Enlisted(replica=0 if replica is None else replica.size))
        state._rehearse()
        broken: int | None = None
        while True:
            match self._next(broken):
                case Over(generation, finished=finished):
                    self._put_down(roll_back=not finished)
                    self._control.tell(Stopped(generation, self._version[1]))
                    if finished:
                        # Not `finish`: the trained state is worth more than the last checkpoint.
                        checkpoint.wait()
                        if self._rank == 0:
                            self._state._ended()
                        return self._state
                case Enter() as world:
                    broken = None if self._live_in(world) else world.generation
                case Leave(signum, deadline):
                    self._save_before_leaving(deadline)
                    # Do not return: a leaving worker must not run the script's code after `train`.
                    raise SystemExit(EXIT_SIGNAL_BASE + signum)

    def _next(self, broken: int | None) -> Enter | Over | Leave:
        try:
            return self._control.next(broken)
        except (ChannelLost, JobClosed) as error:
            raise error from self._last_error

    def _save_before_leaving(self, deadline: float | None) -> None:
        """Write a checkpoint if this worker has rank 0; the other ranks need not, because the
        state is in rank 0's memory while it stays. (A sharded state was written already.)

        If the other nodes continue training, their world takes the fence of the checkpoint storage,
        and this checkpoint is dropped.
        """
        generation, step = self._version
        if self._rank == 0 and generation >= 0 and mesh.current() is None:
            grace = None if deadline is None else deadline - time.monotonic()
            checkpoint.save_before_leaving(self._state, step, generation, grace)

    def close(self) -> None:
        """Leave the group, however the training ended."""
        self._put_down(roll_back=False)
        if (checks := self._state._checks()) is not None:
            checks.wait()
        if (snapshots := self._state._part_snapshots()) is not None:
            snapshots.end()
            snapshots.wait_until_sealed()

    # --- a world ---------------------------------------------------------------------------------

    def _live_in(self, world: Enter) -> bool:
        """Live in a world from entry to end; return False if it broke and is not over for all."""
        gate = self._control.gate(world.generation)
        try:
            self._enter(world)
            here = session.current()
            self._take_steps(gate, here)
            if stored_state.must_save_together(here):
                # The others continue; the rest of our replica is at this boundary, too.
                self._control.tell(Stopped(world.generation, self._version[1]))
                stored_state.save_together_and_wait(here, self._state, self._version[1])
        except BaseException as error:
            if self._is_to_be_raised(error, world.generation):
                raise
            return False
        finally:
            if (status_page := self._control.status_page) is not None:
                status_page.unhurried()  # waiting for a world is not a hang
        self._put_down(roll_back=False)
        self._control.left(world.generation)
        self._control.tell(Stopped(world.generation, self._version[1]))
        return True

    def _enter(self, world: Enter) -> None:
        self._where, self._rank = Where.BUILD, world.rank
        began = time.monotonic()
        faults.position(rank=world.rank, step=self._version[1], generation=world.generation)
        faults.at("group.build")
        session.set_environment(world)
        timeout, backend = self._coordinator.timeout, self._coordinator.c10d_backend
        store, self._group = enter(self._control, world, backend, timeout, mesh.current())
        stood = time.monotonic()
        if (snapshots := self._state._part_snapshots()) is not None:
            snapshots.end()
        if world.rewind is not None:
            self._go_back(*world.rewind)
        form = self._state._form()
        number = form_number(form)
        ready, copying = self._state._ready_in(), self._state._copies()
        told = session.exchange(self._group, self._version, number, ready=ready, copying=copying)
        session.enter(
            Session(
                rank=world.rank,
                size=world.size,
                generation=world.generation,
                local_rank=world.local_rank,
                local_size=world.local_size,
                store=store,
                group=self._group,
                versions=told.versions,
                version=self._version,
                forms=told.forms,
                status_page=self._control.status_page,
                replica=self._group.replica,
                ready=told.ready,
                copying=told.copies,
                next_size=self._control.next_size,
                agent=InProcessRequests(self._control, world.generation)
                if self._group.replica is not None
                else None,
            )
        )
        here = session.current()
        compatibility.check(here, form)
        stored_state.note_lost(here)
        self._synchronise(here)
        built, fetched = stood - began, time.monotonic() - stood
        step = self._version[1]
        self._control.tell(Up(here.generation, step, here.received, built, fetched))

    def _go_back(self, generation: int, written: int, step: int) -> None:
        """Go back to a certified version if this worker's state is void: older generations wrote
        beyond it."""
        version = written, step
        if self._version[0] >= generation or self._version <= version:
            return
        checks = self._state._checks()
        if checks is not None and checks.go_back(version):
            self._version = version
        else:  # it is fetched from a worker that has it
            self._version = TORN

    def _synchronise(self, here: Session) -> None:
        """Give all ranks the freshest state in memory, or a checkpoint if none has trained."""
        self._where, self._rollback, self._half_written = Where.SYNC, None, False
        if self._state._complete():
            self._version = here.version
        self._rollback = _RollbackPoint(self._version, self._state.snapshot())
        if is_lost := here.freshest[0] < 0:
            load = partial(self._load_checkpoint, here), partial(self._take_over, here)
            StateRecovery(here, self._state._part_snapshots(), *load).run()
        base = here.freshest
        if base == TORN:
            self._begin_again(here)
        if here.rank == 0 and base[0] < 0:
            stored = checkpoint.get_checkpoint_manager() is not None
            self._control.tell(Begins(here.generation, base[1], stored))
        faults.position(rank=here.rank, step=base[1], generation=here.generation)
        self._half_written |= self._version != base
        faults.at("sync.begin")
        call_sync(self._state, rank=here.rank, size=here.size)
        here.group.check_collectives()
        faults.at("sync.end")
        if (checks := self._state._checks()) is not None:
            checks.began_at(base)
        self._version = here.version = here.version_after_sync
        if is_lost and here.agent is not None:
            self._control.settle(base, here.generation)
        self._rollback = None
        self._steps.restart(self._state)
        checkpoint.entered(here.generation, base[1], saves=here.rank == 0)

    def _begin_again(self, here: Session) -> None:
        """Raise: there is nothing to continue from. A worker with a part of a sharded state that is
        not whole any more ends, and is replaced by one with its first state."""
        if here.replica is None:
            raise NonRetryableException(
                "No worker holds a complete state any more, and there is no checkpoint to restore."
            )
        if self._version == FIRST:
            raise GenerationOver("The other workers of this replica begin again, too.")
        log.error(
            "There is no snapshot and no checkpoint: this worker is replaced, and training begins "
            "at step 0."
        )
        raise SystemExit(EXIT_FAILED)

    def _load_checkpoint(self, here: Session, beyond: int) -> int | None:
        """Collective: load the checkpoint, if there is one beyond this step, on rank 0 or the first
        replica, which then has the freshest state. Return its step on all ranks."""
        if stored_state.is_writer(here) and checkpoint.get_checkpoint_manager() is not None:
            self._half_written = True
            step = stored_state.load(here, self._state, beyond)
            self._half_written = False
            if step is not None:
                self._version = here.version = (-1, step)
        self._tell_versions(here)
        return here.freshest[1] if here.freshest > (-1, beyond) else None

    def _take_over(self, here: Session, version: Version) -> None:
        """Collective: note that all workers have loaded this version."""
        self._version = here.version = version
        self._tell_versions(here)

    def _tell_versions(self, here: Session) -> None:
        form = here.forms[here.rank]
        here.versions = session.exchange(here.group, self._version, form).versions

    def _take_steps(self, gate: Gate, here: Session) -> None:
        """Take steps until the gate stops us.

        Between the gate and `steps.run` nothing may wait for another rank: once a step is
        announced, the others wait for this rank inside that step.
        """
        rank, generation, step = here.rank, here.generation, self._version[1]
        status_page, every, first = here.status_page, self._options.snapshot_every, step
        if status_page is not None:
            status_page.rank = rank
        if self._state._every_step:
            every = 1
        checks = self._state._checks()
        check_collectives, before_commit = here.group.check_collectives, here.before_commit
        between = _Between(self._coordinator, self._options, here, self._state)
        self._where = Where.BETWEEN
        # Also before the first step: the previous world may have ended right after the last one.
        # And before reporting the end: a worker that must enter another world at this step
        # finishes there, where others wait for it.
        while True:
            if status_page is not None and not status_page.is_leased():
                self._await_lease(gate, status_page)
            if checks is not None and step > first and checks.is_due(self._version):
                self._check(gate, checks)
            if not gate.enter(step) and not self._may_enter(gate, step):
                return
            if step >= self._last_step:
                raise StopException("The coordinator reports that training is done.")
            if status_page is not None:
                status_page.entered(generation, step)
            if faults.planned:
                faults.position(rank=rank, step=step, generation=generation)
            if step == first or step % every == 0:
                self._rollback = tuple.__new__(
                    _RollbackPoint, (self._version, self._state.snapshot())
                )
            self._where = Where.STEP
            if faults.planned:
                faults.at("step.begin")
            self._state, stats = self._steps.run(self._state)
            check_collectives(again=False)
            if before_commit is not None:
                before_commit()
            if (judged := self._state._judged()) is not None:
                action, why = judged
                if action == "stop":
                    self._end_after_bad_step(here, why)
                self._steps.restart(self._state)
                if action == "retry":
                    continue
                stats = None
            if faults.planned:
                faults.at("step.end")
            step += 1
            self._version = here.version = (generation, step)
            self._where = Where.BETWEEN
            self._state._committed(self._version)
            if between.is_last(self._state, step, stats) and self._last_step == math.inf:
                self._last_step = step

    def _end_after_bad_step(self, here: Session, why: str) -> NoReturn:
        """Store the state that the step began with, and end the job; on all ranks."""
        step = self._version[1]
        if here.status_page is not None:
            here.status_page.unhurried()
        if stored_state.is_writer(here):
            stored_state.save_at_end(here, self._state, step)
        here.group.tell_all([step])  # an error of a rank ends the others
        raise NonRetryableException(why_it_ends(why, step))

    def _check(self, gate: Gate, checks: StateChecks) -> None:
        """Begin a check of the state, after the last one. Without a verdict on that one, the world
        is about to end, or states are not compared any more."""
        version = generation, step = self._version
        last = checks.last if checks.last[0] == generation else NONE
        with stalls.Counted(stalls.PEERS):
            if not self._control.is_certified(gate, last):
                if self._control.unchecked:
                    checks.end()
                return

        def tell(digest: int, pinned: Version, odd: int) -> None:
            with suppress(ChannelLost):  # the control thread reports it
                self._control.tell(Checked(generation, step, digest, *pinned, odd))

        checks.begin(version, self._control.certified, tell)

    def _may_enter(self, gate: Gate, step: int) -> bool:
        """Wait at a shut gate for the decision; return False if the last step is done."""
        with stalls.Counted(stalls.PEERS):
            decision = self._control.wait_at(gate, step)
        if decision is GateDecision.OVER:
            raise GenerationOver(f"Generation {gate.generation} is over: {self._control.reason}.")
        return decision is GateDecision.GO

    def _await_lease(self, gate: Gate, status_page: StatusPage) -> None:
        """Wait until the node holds its lease again, or the world is over. The agent may be
        stopped: the other nodes continue without this one when its lease has ended."""
        with stalls.Counted(stalls.PEERS):
            while not (gate.over or status_page.is_leased()):
                time.sleep(LEASE_POLL_INTERVAL)

    # --- when it fails ---------------------------------------------------------------------------

    def _is_to_be_raised(self, error: BaseException, generation: int) -> bool:
        """Do what `outcome` decides. Report first: rolling back may take a while."""
        if self._group is not None:
            error = self._group.explain(error)
        kind = kind_of(error, self._where)
        over = self._control.is_over(generation)
        if kind is Kind.USER and not over:
            self._count_failure(error)
        failures_left = self._failures <= self._options.max_failures
        action = decide(kind, over=over, failures_left=failures_left)
        if isinstance(error, Exception) and kind in _TOLD:
            self._coordinator.on_error(error)
        self._report(action, error, generation)
        if action is Action.GIVE_UP and not failures_left:
            raise RuntimeError(self._gave_up()) from error
        if action in (Action.GIVE_UP, Action.WITHDRAW, Action.RAISE):
            return True
        if action is not Action.FINISH:
            self._put_down(roll_back=True)
        _forget_locals(error)
        return False

    def _count_failure(self, error: BaseException) -> None:
        if self._version[1] > self._furthest:
            self._furthest, self._failures = self._version[1], 0
        self._failures += 1
        self._last_error = error

    def _gave_up(self) -> str:
        return (
            f"Training failed {self._failures} times in this worker without getting past step "
            f"{self._furthest} (max_failures is {self._options.max_failures}); giving up. The last "
            "error is above."
        )

    def _report(self, action: Action, error: BaseException, generation: int) -> None:
        step = self._version[1]
        if (
            self._where is Where.STEP
            and self._rollback is not None
            and self._rollback.content is not None
        ):
            step = self._rollback.version[1]
        if action is Action.HINT:
            self._control.tell(PeerLost(generation, step, _one_line(error)))
        elif action is Action.FINISH:
            self._control.tell(Finished(generation, self._version[1]))
        elif action is Action.WITHDRAW:
            self._control.tell(Unfit())
        elif action in (Action.RETRY, Action.GIVE_UP):
            text = "".join(traceback.format_exception(error))
            told, place = text[-bootstrap.TOLD_TRACEBACK :], error_file.user_frame(text)
            retry = action is Action.RETRY
            self._control.tell(Erred(generation, step, _one_line(error), told, retry, place))

    def _put_down(self, *, roll_back: bool) -> None:
        """Leave the group, if there is one; after that nothing writes to the state."""
        group, self._group = self._group, None
        self._control.unguard()
        if group is None:
            session.leave()
            return
        if roll_back:
            group.abort("this worker rolls back")
        # A state may ask for its rank when it rolls back, as those of 0.1 do.
        is_quiet = group.leave(self._roll_back) if roll_back else group.leave()
        session.leave()
        if not is_quiet:
            raise RuntimeError(
                "An aborted collective may still write to this worker's memory: the worker exits "
                "and is replaced."
            )

    def _roll_back(self) -> None:
        """Undo the step or synchronisation in flight."""
        if self._where not in (Where.STEP, Where.SYNC) or self._rollback is None:
            return
        if (
            self._rollback.content is None
        ):  # rollback not supported: the user handles a half-done step
            if self._where is Where.SYNC and self._half_written:
                self._version = TORN
            return
        try:
            self._state.apply(self._rollback.content)
            self._version = self._rollback.version
        except Torn as error:
            log.warning("Cannot roll back the state (it will be fetched from a peer): %s", error)
            self._version = TORN
        except Exception:  # an error in user code: the state is half-written all the same
            log.exception("Rolling back the state failed; it will be fetched from a peer.")
            self._version = TORN


class _Between:
    """The work after a step: checkpoints, and hooks of release 0.1 if overridden."""

    def __init__(
        self, coordinator: CoordinatorP2P, options: Options, here: Session, state: State
    ) -> None:
        self._coordinator, self._here = coordinator, here
        self._is_writer = stored_state.is_writer(here)
        self._every, self._paced = options.checkpoint_every, checkpoint.is_paced()
        self._monitored = overrides(coordinator, "monitor_progress")
        self._reported = overrides(coordinator, "report_progress")
        self._told_when = overrides(coordinator, "should_save_checkpoint")
        self._told_to_stop = overrides(coordinator, "should_stop_training")
        self._told_to_meet = overrides(coordinator, "should_rendezvous")
        #: Whether user code may ask for checkpoints.
        self._told_by_user = self._told_when or _wants_to_be_asked(state)
        hooks = self._monitored, self._reported, self._told_by_user, self._told_to_stop
        #: The type of state for which there are no hooks to call and no checkpoints to write.
        asked = any(hooks) or self._told_to_meet or self._paced
        quiet = self._every is None and not asked
        self._quiet_with = type(state) if quiet else None

    def is_last(self, state: State, step: int, stats: Any) -> bool:
        """Call the hooks after `step` steps; return whether the coordinator ends the training."""
        coordinator = self._coordinator
        if stats is None and type(state) is self._quiet_with:
            return coordinator.stop_training
        if stats is not None or self._monitored:
            coordinator.monitor_progress(state, stats)
        if self._wants_checkpoint(state, step) and self._is_writer:
            stored_state.save(self._here, state, step)
        if self._reported:
            coordinator.report_progress(state)
        if coordinator.stop_training or (self._told_to_stop and coordinator.should_stop_training()):
            return True
        if self._told_to_meet and coordinator.should_rendezvous(state):
            raise AnotherWorld(f"should_rendezvous asked for a new world at step {step}.")
        return False

    def _wants_checkpoint(self, state: State, step: int) -> bool:
        """Ask on every rank, as in 0.1: a rank that did not ask would count wrong."""
        wanted = state.should_save_checkpoint(self._here.rank)
        if self._told_when:
            wanted = self._coordinator.should_save_checkpoint() or wanted
        if self._told_by_user and self._is_writer:
            wanted = stored_state.is_wanted_by_any(self._here, wanted)
        if self._paced and self._is_writer:
            wanted = stored_state.is_due(self._here, step) or wanted
        return wanted or (self._every is not None and step % self._every == 0)


def _wants_to_be_asked(state: State) -> bool:
    """Return whether the state overrides `should_save_checkpoint`."""
    name = "should_save_checkpoint"
    return name in vars(state) or getattr(type(state), name) is not State.should_save_checkpoint


def _one_line(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[: bootstrap.TOLD_MESSAGE]
    except Exception:  # the user's own __str__ failed
        return f"{type(error).__name__}: <unprintable>"


def _forget_locals(error: BaseException) -> None:
    """Clear the frames of a failed step, which hold its tensors and its group."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def train(coordinator: Coordinator, steps: Steps, state: State, options: Options) -> State:
    """Run the loop with a control thread beside it."""
    if not isinstance(coordinator, CoordinatorP2P):
        raise TypeError(f"train needs a CoordinatorP2P, not a {type(coordinator).__name__}.")
    if not isinstance(state, State):
        raise TypeError(f"train needs a torchelastic.State, not a {type(state).__name__}.")
    faults.load()
    control = Control(coordinator.open())
    control.start()
    loop = Loop(control, coordinator, options)
    try:
        with left_to_agent(_is_told):
            final = loop.run(steps, state)
    except BaseException:
        _end_badly(loop)
        raise
    else:
        loop.close()
        return final
    finally:
        control.stop()  # in any case: otherwise a standalone process would never end


def _is_told() -> bool:
    """Return whether the agent will tell this worker what to do about a signal: it trains, or the
    node leaves. A worker that waits for a world that never comes is ended by the signal."""
    return session.is_entered() or leaving() is not None


def _end_badly(loop: Loop) -> None:
    """Close what is open, without an error that would hide the one being raised."""
    try:
        loop.close()
    except Exception:
        log.exception("Leaving the process group failed.")
    with suppress(CheckpointError):  # the log has it
        checkpoint.finish()
