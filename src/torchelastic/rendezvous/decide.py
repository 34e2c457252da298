"""Decide which world comes next, for scripts and for in-process workers. Pure.

The leader keeps a `RoundState`, changes it by `StateUpdate` and `published`, and calls
`decide` after every change and at every `wake_at`. The world's phases:

    waiting ──enough ready, settled──▶ agreeing ──a majority has it──▶ running ──all done──▶ closed
       ▲                                                                  │
       │                                              worker failure, node failure, leave, resize
       │ fewer than min                                                   ▼
       └──────────────── gone everywhere ◀───────────────────────────── over ──giving up──▶ closed

Only the embedded rendezvous has the phase agreeing, and only if a world needs more votes than that
of its host. Workers of a new generation start only when every member that is alive and stays has
reported that its workers of the old one are gone: no worker reads a checkpoint that an old worker
is still writing, and no two worlds make progress at once.

A world whose workers have all called `torchelastic.train` is in-process. Its workers outlive their
generation, which ends in one of two ways:

    by a failure   running ──▶ over ──every worker has stopped──▶ the next world
    by agreement   running ──▶ pausing ──every worker has reported its step──▶ the next world

No worker is stopped for a newcomer or a leave: each worker reports the step it has entered and
enters no other; all run through the largest of these steps before they enter the next world. A
failure in the meantime cancels the pause.
"""

from __future__ import annotations

from collections.abc import Callable

from torchelastic.errors import EXIT_FAILED, EXIT_USAGE
from torchelastic.events.failure import Failure, node_failure
from torchelastic.records import replace
from torchelastic.rendezvous import (
    connectivity,
    held_out,
    replicas,
    root_cause,
    state_check,
    suspects,
)
from torchelastic.rendezvous.choosing import candidates, choose, holders_left_out, in_order, workers
from torchelastic.rendezvous.forming import REPEAT_INTERVAL, form, newcomers_to, settled_at
from torchelastic.rendezvous.restart_policy import (
    Ending,
    Kind,
    RestartDecision,
    judge,
    pause,
    why_pause,
)
from torchelastic.rendezvous.round_state import (
    RoundDecision,
    RoundRules,
    RoundState,
    can_be_confirmed,
    failed_alike,
    failed_nodes,
    follows_later_host,
    has_trained,
    names_of,
    next_hold_end,
    the_world,
    to_claim,
    with_holds,
)
from torchelastic.rendezvous.state_check import DIFFERENCES_LIMIT, Checked, Comparison, Rewind
from torchelastic.rendezvous.world import Member, World

#: The most consequences of a failure that a world lists.
CONSEQUENCES_LIMIT = 32
_GONE = "its connection or lease ended without notice"

#: Ends a running world: `_end_generation`, or `_ask_for_steps`.
Stop = Callable[[RoundState, Kind, str], RoundDecision]


def decide(rules: RoundRules, state: RoundState, now: float) -> RoundDecision:
    """Decide what to do in this state."""
    state = with_holds(state, now)
    decision = _wake_at_hold_end(state, _decide(rules, state, now))
    if decision.world is None and (drop := _to_drop(rules, state)):
        return replace(decision, drop=drop)
    if decision.world is not None and _calls_for_probe(rules, state, decision.world):
        probe = decision.world.generation + 1
        decision = replace(decision, world=replace(decision.world, probe=probe))
    if decision.world is not None and decision.world.base != state.base:
        return replace(decision, world=replace(decision.world, base=state.base))
    if decision.world is None and _is_base_news(state):
        return RoundDecision(replace(the_world(state), base=state.base))
    if decision.world is None and (found := _checked(state)) is not None:
        return RoundDecision(_compared(state, found))
    return decision


def _wake_at_hold_end(state: RoundState, decision: RoundDecision) -> RoundDecision:
    """Decide again when a node that is held out may come back."""
    at = next_hold_end(state)
    if at is None or decision.world is not None:
        return decision
    return replace(decision, wake_at=at if decision.wake_at is None else min(at, decision.wake_at))


def _is_base_news(state: RoundState) -> bool:
    """Return whether nodes outside the world still have to learn its base from the leader."""
    world = state.world
    if world is None or world.phase != "running" or world.base == state.base:
        return False
    return any(world.place(node) is None for node in state.members)


def _decide(rules: RoundRules, state: RoundState, now: float) -> RoundDecision:
    world = state.world
    if world is None:
        return form(rules, state, now, at_once=False)
    if world.phase == "waiting":
        gives_up = _give_up(state) if world.in_process else None
        return gives_up or form(rules, state, now, at_once=world.in_process)
    if world.phase == "agreeing":
        return _await_agreement(state, now)
    if world.phase == "running":
        return _enlist(rules, state) or _watch(rules, state, now)
    if world.phase == "pausing":
        return _await_steps(rules, state, now)
    if world.phase == "over":
        follow_up = _continue_in_process if world.in_process else _continue_or_close
        return follow_up(rules, state, now)
    return RoundDecision()


# --- agreeing ------------------------------------------------------------------------------------


def _await_agreement(state: RoundState, now: float) -> RoundDecision:
    """Start the world once enough nodes have confirmed it. End it if one of its nodes is gone
    first, or too many of those that had to agree: the job then reports that it waits for them."""
    world = the_world(state)
    if state.lost:
        return _end_generation(state, "node-failure", f"{names_of(state, state.lost)} failed")
    if leaving := _leavers(state):
        return _end_generation(state, "leave", f"{names_of(state, leaving)} leaves")
    if state.roll is None or not state.roll.before:
        return RoundDecision(replace(world, phase="running"))
    at = state.since + REPEAT_INTERVAL
    if now >= at or not can_be_confirmed(state):
        reason = f"too few nodes of the last world confirmed generation {world.generation}"
        return _end_generation(state, "node-failure", reason)
    return RoundDecision(wake_at=at)


# --- running -------------------------------------------------------------------------------------


def _enlist(rules: RoundRules, state: RoundState) -> RoundDecision | None:
    """Make a world in-process once all of its workers have called `torchelastic.train`."""
    world = the_world(state)
    if world.in_process:
        return None
    members = state.members
    called = [node.node in members and members[node.node].member.in_process for node in world.nodes]
    if all(called) and not state.failures:
        enlisted = [members[node.node].member for node in world.nodes]
        if why := _mesh_misfit(rules, enlisted):
            return RoundDecision(replace(world, phase="closed", exitcode=EXIT_USAGE, reason=why))
        return RoundDecision(replace(world, in_process=True, replica=enlisted[0].replica))
    if state.done and any(present.member.in_process for present in members.values()):
        reason = "some nodes exited without calling torchelastic.train while others wait in it"
        return RoundDecision(replace(world, phase="closed", exitcode=EXIT_FAILED, reason=reason))
    return None


def _mesh_misfit(rules: RoundRules, members: list[Member]) -> str:
    """Return why the meshes of the workers make no replicas; empty if they do."""
    for member in members:
        why = replicas.mesh_misfit(
            member.replica, member.nproc, flag=rules.replica_size, job=members[0].replica
        )
        if why:
            return f"{member.name}: {why}"
    return ""


def _watch(rules: RoundRules, state: RoundState, now: float) -> RoundDecision:
    """End a running world after success or a failure, for a leave, or to resize it."""
    if the_world(state).in_process:
        ended, stop = _in_process_ended(state), _ask_for_steps
    else:
        ended, stop = _script_ended(state), _end_generation
    if ended is not None:
        return ended
    if (leaving := _leavers(state)) and not _is_ending(state):
        why = state.members[leaving[0]].member.leaving
        return stop(state, "leave", f"{names_of(state, leaving)} leaves ({why})")
    if left := _departed(state):
        return _end_generation(state, "leave", f"{names_of(state, left)} has left")
    if reason := why_to_replace(rules, state):
        return stop(state, "resize", reason)
    return _consider_growth(rules, state, now, stop)


def _script_ended(state: RoundState) -> RoundDecision | None:
    """The end of a world of scripts: success, or the first failure."""
    if all(node.node in state.done for node in the_world(state).nodes):
        return _close_as_succeeded(state)
    cause, _ = _first_failure(state)
    if cause is None:
        return _end_by_silence(state)
    if cause.is_node:
        return _end_generation(
            state, "node-failure", f"{names_of(state, failed_nodes(state))} failed"
        )
    return _end_generation(state, "failure", cause.sentence())


def _in_process_ended(state: RoundState) -> RoundDecision | None:
    """The end of a generation that cannot continue; None while it can."""
    found = _checked(state)
    if found is not None and found.back is not None:
        return _go_back(state, found, found.back)
    if state.finished >= 0:
        done = _end_generation(state, "finished", "training is done").world
        assert done is not None
        return RoundDecision(replace(done, after=state.finished - 1), "finished")
    if state.failures:
        kind, cause, _ = _classify(state)
        return _end_generation(state, kind, _reason_for(state, kind, cause))
    if failed := failed_nodes(state):
        return _end_generation(state, "node-failure", f"{names_of(state, failed)} failed")
    return _end_by_silence(state)


def _checked(state: RoundState) -> Comparison | None:
    """The verdict on a check that all workers of the world have reported; None without a new
    one."""
    world = state.world
    if world is None or world.phase not in ("running", "pausing") or world.unchecked:
        return None
    said: list[Checked] = []
    for node in world.nodes:
        present = state.members.get(node.node)
        if present is None or present.member.checked_in != world.generation:
            return None
        said += present.member.checked
        if any(one.step <= world.certified or one.step != said[0].step for one in said[-1:]):
            return None
    return state_check.compare(said) if said and len(said) == world.size else None


def _compared(state: RoundState, found: Comparison) -> World:
    """The world with the result of a check: the step is certified, or there are no more checks."""
    world = the_world(state)
    if found.ends:
        return replace(world, unchecked=state_check.sentence(found, (), 0))
    world = replace(world, certified=found.step)
    blamed = [node for node in world.nodes if node.has_rank(found.blamed)]
    if world.rewind is None or not blamed:
        return world
    node = blamed[0]
    why = f"rank {found.blamed} had a wrong state, as the steps after {world.rewind.step} show"
    held = held_out.note_other_bits(world.held, node.node, node.name, why, at_once=False)
    return replace(world, held=held, blamed=f"{node.name} computes other bits: {why}")


def _go_back(state: RoundState, found: Comparison, back: tuple[int, int]) -> RoundDecision:
    """End a generation in which the states differ; end the job if that keeps happening."""
    world = the_world(state)
    named = [
        f"rank {rank} on {node.name}"
        for node in world.nodes
        for rank in found.wrong
        if node.has_rank(rank)
    ]
    why = state_check.sentence(found, named, world.size)
    last = world.rewind
    times = last.times + 1 if last is not None and last.step == back[1] else 1
    if times > DIFFERENCES_LIMIT:
        reason = f"{why}; this happened {DIFFERENCES_LIMIT} times already; giving up"
        return RoundDecision(replace(world, phase="closed", exitcode=EXIT_FAILED, reason=reason))
    ended = _end_generation(state, "failure", why)
    assert ended.world is not None
    rewind = Rewind(world.generation + 1, *back, times)
    return replace(ended, world=replace(ended.world, rewind=rewind, wrong=found.wrong))


def _end_by_silence(state: RoundState) -> RoundDecision | None:
    """End a world whose nodes cannot reach each other; they stay members."""
    pairs = connectivity.silent_pairs(state)
    return (
        _end_generation(state, "node-failure", connectivity.sentence(state, pairs))
        if pairs
        else None
    )


def _is_ending(state: RoundState) -> bool:
    """Return whether the script of a worker has returned, or the training is done on a node."""
    world = the_world(state)
    entries = (state.members.get(node.node) for node in world.nodes)
    return bool(state.done) or any(
        entry is not None and entry.member.returned == world.generation for entry in entries
    )


def _departed(state: RoundState) -> list[str]:
    """The nodes of the world that announced a leave and were gone before the leader saw it."""
    left = state.left - state.done
    return [node.node for node in the_world(state).nodes if node.node in left] if left else []


def _leavers(state: RoundState) -> list[str]:
    """The nodes of the world that have announced a leave and are still members."""
    return [
        node.node
        for node in the_world(state).nodes
        if node.node in state.members and state.members[node.node].member.leaving
    ]


def _end_generation(state: RoundState, kind: Kind, reason: str) -> RoundDecision:
    """Stop the workers of the world."""
    cause, consequences = _first_failure(state)
    world = replace(
        the_world(state),
        phase="over",
        ending=kind,
        saver=next(iter(_leavers(state)), ""),
        after=None,
        reason=reason,
        cause=cause,
        consequences=_shortened(consequences),
    )
    return RoundDecision(world, kind)


def _close_as_succeeded(state: RoundState) -> RoundDecision:
    reason = "every worker succeeded"
    world = replace(the_world(state), phase="closed", reason=reason, cause=None, consequences=())
    return RoundDecision(world)


# --- running: resizing ---------------------------------------------------------------------------


def _consider_growth(rules: RoundRules, state: RoundState, now: float, stop: Stop) -> RoundDecision:
    newcomers = newcomers_to(rules, state)
    if not newcomers or _is_ending(state):  # finished work is not repeated for a newcomer
        return RoundDecision()
    at = settled_at(rules, state, newcomers, len(candidates(rules, state)))
    if rules.grow.when == "every":
        at = max(at, state.running_since + rules.grow.seconds)
    if rules.grow.when == "after-checkpoint" and not state.checkpoint:
        return RoundDecision()
    if now < at:
        return RoundDecision(wake_at=at)
    return stop(state, "resize", _who_joins(state, newcomers))


def _who_joins(state: RoundState, newcomers: list[str]) -> str:
    nodes = [node for node in newcomers if the_world(state).place(node) is None]
    if nodes:
        return f"{names_of(state, nodes)} joins"
    return f"a replacement on {names_of(state, newcomers)} is ready"


def waits_for_checkpoint(rules: RoundRules, state: RoundState) -> bool:
    """Return whether the checkpoint path must be watched: only while newcomers wait for one."""
    return rules.grow.when == "after-checkpoint" and bool(newcomers_to(rules, state))


def why_to_replace(rules: RoundRules, state: RoundState) -> str:
    """Return why spare nodes should replace slow ones; empty if they should not.

    `events.analysis.stragglers` finds slow nodes; `choosing` prefers others. The world
    never becomes smaller. Among slow nodes, those of the world come first: otherwise two of them
    would replace each other forever.
    """
    world = the_world(state)
    slow = slow_nodes(state)
    if not slow or _is_ending(state) or state.finished >= 0:
        return ""
    chosen = choose(rules, in_order(candidates(rules, state), world), state)
    staying = {offer.node for offer in chosen}
    giving = [node for node in slow if node not in staying]
    coming = [offer.node for offer in chosen if world.place(offer.node) is None]
    if not giving or not coming or workers(chosen) < world.size:
        return ""
    verb = "replaces" if len(coming) == 1 else "replace"
    return f"{names_of(state, coming)} {verb} slow {names_of(state, giving)}"


def slow_nodes(state: RoundState) -> list[str]:
    """The nodes of the world that are slow, in its order."""
    world = the_world(state)
    places = {node: place for node in state.slow if (place := world.place(node)) is not None}
    return sorted(places, key=places.__getitem__)


# --- pausing -------------------------------------------------------------------------------------


def _ask_for_steps(state: RoundState, kind: Kind, reason: str) -> RoundDecision:
    """Ask every worker for the step it has entered."""
    return RoundDecision(
        replace(the_world(state), phase="pausing", ending=kind, reason=reason), kind
    )


def _await_steps(rules: RoundRules, state: RoundState, now: float) -> RoundDecision:
    """Once every worker has reported its step, form the world that follows the largest one."""
    world = the_world(state)
    if (end := _in_process_ended(state)) is not None:
        return end
    if not all(node.node in state.members for node in world.nodes):
        return _end_generation(state, "leave", world.reason)  # gone before the boundary
    members = [state.members[node.node].member for node in world.nodes]
    if not all(member.paused == world.generation for member in members):
        return RoundDecision()
    return _go_on_after(rules, state, max(member.entered for member in members), now)


def _go_on_after(rules: RoundRules, state: RoundState, step: int, now: float) -> RoundDecision:
    world = the_world(state)
    formed = form(rules, state, now, at_once=True)
    if formed.world is None:
        return formed  # no node offers a store yet, but one is starting
    # Leavers alone, because the others are out of reach, would hand their state over to no node.
    stays = any(not state.members[node.node].member.leaving for node in formed.world.nodes)
    if formed.world.phase not in ("running", "agreeing") or not stays:
        return RoundDecision(replace(world, phase="over", after=step), world.ending)
    leaving = tuple(n.node for n in world.nodes if formed.world.place(n.node) is None)
    following = replace(formed.world, after=step, reason=world.reason)
    return RoundDecision(following.with_nodes(following.nodes, leaving), world.ending)


# --- over: the next world, or the end of the job -------------------------------------------------


def _continue_or_close(rules: RoundRules, state: RoundState, now: float) -> RoundDecision:
    """Form the next world, wait, or close the job, once the old workers are gone on all nodes."""
    world = the_world(state)
    if _calls_for_probe(rules, state, world):
        return RoundDecision(world, world.ending)  # with the probe
    busy = [node.node for node in world.nodes if _is_busy(state, node.node, world.generation)]
    late = state.since + _patience(rules, state, busy)
    if busy and (now < late or not _may_go_without(rules, state, busy)):
        return _wait_for_stop(state, busy, now, late)
    if state.done >= world.members:  # they finished while they were stopped
        return _close_as_succeeded(state)
    if busy:
        state = replace(state, lost=(*state.lost, *busy))
    probed = state.said_at + rules.lease
    if rules.probes and now < probed and _is_probing(state):
        return RoundDecision(wake_at=probed)
    kind, cause, consequences = _classify(state)
    failure = cause if cause is None or not cause.is_node else None
    found = suspects.find(rules, state, failure, consequences)
    failed = failed_alike(state, failure) if failure is not None else frozenset()
    if found.instead:
        restart = RestartDecision(True, world.restarts, "")  # not charged
    else:
        restart = judge(
            Ending(
                kind=kind,
                lifetime=state.since - state.running_since,
                failure=failure,
                step=state.step,
                trained=world.proven or has_trained(state),
                everywhere=failure is not None and failed >= world.members,
                all_ranks=failure is not None and _raised_on_all_ranks(state, failure),
                without=bool(failed) and failed <= found.out,
            ),
            world.restarts,
            budget=rules.max_restarts,
            count_resizes=rules.count_resizes,
        )
    said = [found.instead or _reason_for(state, kind, cause), restart.sentence]
    if restart.go_on:
        said.append(found.sentence)
    state = replace(
        state,
        world=replace(
            world,
            restarts=restart.history,
            cause=cause,
            consequences=_shortened(consequences),
            reason="; ".join(filter(None, said)),
            held=found.held,
        ),
        out=state.out & {one.node for one in found.held if one.seconds} | found.out,
    )
    if not restart.go_on:
        exitcode = EXIT_USAGE if restart.incurable else EXIT_FAILED
        return RoundDecision(replace(the_world(state), phase="closed", exitcode=exitcode), kind)
    if now < state.since + pause(restart.history):
        return _wait_before_restart(state, world, restart)
    return replace(form(rules, state, now, at_once=True), kind=kind)


def _raised_on_all_ranks(state: RoundState, failure: Failure) -> bool:
    """Return whether every rank of the last world raised the exception at the same place."""
    alike = [one for one in state.failures if one.told]
    same = {one.rank for one in alike if (one.kind, one.place) == (failure.kind, failure.place)}
    return failure.told and len(same) >= the_world(state).size


def _wait_before_restart(
    state: RoundState, world: World, restart: RestartDecision
) -> RoundDecision:
    """Wait before the next world, and say why. `world` is charged only once, after the wait."""
    cause = the_world(state).cause
    reason = why_pause(restart.history)
    if cause is not None:
        reason = f"{cause.sentence()}; {reason}"
    if world.reason != reason:
        return RoundDecision(replace(world, reason=reason), world.ending)
    return RoundDecision(wake_at=state.since + pause(restart.history))


def _wait_for_stop(state: RoundState, busy: list[str], now: float, late: float) -> RoundDecision:
    """Wait, and repeat which nodes have workers that have not stopped. `late`: when the next world
    may do without them."""
    at = state.said_at + REPEAT_INTERVAL
    if now < at:
        return RoundDecision(wake_at=min(time for time in (at, late) if time > now))
    reason = f"waiting for the workers of {names_of(state, busy)} to stop"
    return RoundDecision(replace(the_world(state), reason=reason), the_world(state).ending)


# --- over: in-process workers --------------------------------------------------------------------


def _continue_in_process(rules: RoundRules, state: RoundState, now: float) -> RoundDecision:
    """Form the next world, wait, or close the job."""
    world = the_world(state)
    if world.ending == "finished":
        return _finish(state, now)
    # With `after`, its workers first run through that step, unless something ends them earlier.
    if world.after is not None and (end := _in_process_ended(state)) is not None:
        return end
    return _continue_or_close(rules, state, now)


def _give_up(state: RoundState) -> RoundDecision | None:
    """End a job that would wait forever for a worker that cannot start."""
    fatal = [failure for failure in state.failures if failure.fatal]
    if not fatal:
        return None
    reason = f"{fatal[0].sentence()}: a replacement cannot start"
    world = replace(the_world(state), phase="closed", exitcode=EXIT_USAGE, cause=fatal[0])
    return RoundDecision(replace(world, reason=reason), "failure")


def _finish(state: RoundState, now: float) -> RoundDecision:
    """Training is done: wait for the scripts to end, and close the job.

    A node that is lost now may only be unreachable for a while: its scripts continue.
    """
    world = the_world(state)
    still = tuple(node for node in state.lost if node not in state.members)
    state = replace(state, lost=still)
    if state.lost and (waiting := _await_return(state, now)) is not None:
        return waiting
    cause, consequences = _first_failure(replace(state, failures=_dead(state)))
    if cause is not None:
        what = f"{names_of(state, state.lost)} failed" if cause.is_node else cause.sentence()
        closed = replace(
            world,
            phase="closed",
            exitcode=EXIT_FAILED,
            cause=cause,
            consequences=_shortened(consequences),
            reason=f"after training was done: {what}",
        )
        return RoundDecision(closed, "failure")
    staying = [node.node for node in world.nodes if node.node in state.members]
    if all(node in state.done for node in staying):
        return _close_as_succeeded(state)
    return RoundDecision()


def _await_return(state: RoundState, now: float) -> RoundDecision | None:
    """Wait for lost nodes to return; None after the time limit, or if a worker has died."""
    world = the_world(state)
    reason = f"training is done; waiting for {names_of(state, state.lost)} to come back"
    if _dead(state):
        return None
    if world.reason != reason:
        return RoundDecision(replace(world, reason=reason), "finished")
    at = state.said_at + REPEAT_INTERVAL
    return RoundDecision(wake_at=at) if now < at else None


def _dead(state: RoundState) -> tuple[Failure, ...]:
    """Failures of workers that died after training. A living worker only reports that its peers
    are gone, and they had nothing left to train."""
    new = (item for item in state.failures if item not in state.forgiven)
    return tuple(item for item in new if not item.alive)


# --- what ended a generation ---------------------------------------------------------------------


def _first_failure(state: RoundState) -> tuple[Failure | None, tuple[Failure, ...]]:
    """The first failure of the generation, of a worker or a node, and its consequences."""
    return root_cause.pick(state.failures, _lost(state))


def _lost(state: RoundState) -> list[Failure]:
    generation = the_world(state).generation
    gone = failed_nodes(state)[:CONSEQUENCES_LIMIT]
    return [node_failure(names_of(state, [node]), generation, _GONE) for node in gone]


def _classify(state: RoundState) -> tuple[Kind, Failure | None, tuple[Failure, ...]]:
    """Find what really ended the generation, after all nodes have reported.

    The survivors' collectives fail a few milliseconds before the leader notices the dead node:
    their errors are consequences, and must not use a restart.
    """
    cause, consequences = _first_failure(state)
    ending = the_world(state).ending or "failure"
    if cause is not None and cause.is_node:
        return "node-failure", cause, consequences
    if cause is not None and not root_cause.is_consequence(cause):
        return "error" if cause.alive else "failure", cause, consequences
    if ending == "failure" and not _has_leaver(state):
        return "failure", cause, consequences
    return ("leave" if _has_leaver(state) else ending), None, state.failures


def _has_leaver(state: RoundState) -> bool:
    """Return whether a node of the world has announced that it leaves, and may be gone by now; or
    workers lost a peer in the step before this world, the last one of a leaving node."""
    world = the_world(state)
    last_step = world.after if world.handing_over and world.after is not None else -1
    if any(one.step is not None and one.step <= last_step for one in state.failures):
        return True
    return any(
        node.node not in state.members or state.members[node.node].member.leaving
        for node in world.nodes
        if node.node not in state.lost
    )


def _reason_for(state: RoundState, kind: Kind, cause: Failure | None) -> str:
    """The sentence for users about the end of a generation."""
    if kind == "node-failure" and (failed := failed_nodes(state)):
        return f"{names_of(state, failed)} failed"
    if kind in ("failure", "error") and cause is not None:
        if cause.alive and root_cause.waited_for_others(cause):
            return f"rank {cause.rank} on {cause.node} lost a peer"  # the peer is not known yet
        return cause.sentence()
    return the_world(state).reason


def _shortened(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """The consequences as every node receives them: a limited number, without tracebacks."""
    return tuple(
        replace(failure, traceback="", log_lines=()) for failure in failures[:CONSEQUENCES_LIMIT]
    )


# --- over: which nodes to wait for, and which to drop --------------------------------------------

# a member of the last world         the next world
# reports that its workers are gone  may include it
# knows that the world is over       waits for it
# does not, for a lease              is formed without it, if another one is gone: a step needs
# (`_patience`)                      all; otherwise waits until its lease ends (etcd only)
# refuses connections                is formed without it; then its lease is ended (etcd only)
#
# No world is formed without a node that alone may have the newest state
# (`choosing.holders_left_out`).

#: Seconds in which an agent that runs has reported that it knows of the end of a world.
REPORT_TIME = 1.0


def _is_busy(state: RoundState, node: str, generation: int) -> bool:
    """Return whether a node is a member, stays, and still has workers of the old generation.

    The leader waits for a leaving node only if no node stays or its vote is needed: after one node
    has stopped, the others of the world cannot make a step without it.
    """
    present = state.members.get(node)
    if present is None or present.member.gone >= generation or follows_later_host(state):
        return False
    if node in state.refused:
        return False
    if not present.member.leaving:
        return True
    stays = any(
        other.node in state.members and not state.members[other.node].member.leaving
        for other in the_world(state).nodes
    )
    return not stays or to_claim(state) is None


def _patience(rules: RoundRules, state: RoundState, busy: list[str]) -> float:
    """Seconds after the end of a world in which these nodes must report that they know of it.

    Not much, if others have not heard from them for a lease already.
    """
    silent = {
        other
        for node in the_world(state).nodes
        if (present := state.members.get(node.node)) is not None
        for other in present.member.silent
    }
    return min(rules.lease, REPORT_TIME) if silent.issuperset(busy) else rules.lease


def _may_go_without(rules: RoundRules, state: RoundState, busy: list[str]) -> bool:
    """Return whether the next world need not wait any longer for these nodes: their agents have not
    even reported that they know of the world's end, and another node's workers are gone."""
    world = the_world(state)
    members = [
        state.members[node.node].member for node in world.nodes if node.node in state.members
    ]
    is_gone = any(member.gone >= world.generation for member in members)
    knows = any(state.members[node].member.stopping >= world.generation for node in busy)
    return rules.probes and is_gone and not knows


def _calls_for_probe(rules: RoundRules, state: RoundState, world: World) -> bool:
    """Return whether the end of a world makes all members probe each other: its nodes may not reach
    each other."""
    if not rules.probes or world.phase != "over" or world.probe > world.generation:
        return False
    if connectivity.silent_pairs(state) or state.contested & world.members:
        return True
    if any(suspects.is_unconnected(failure) for failure in state.failures):
        return True
    # A newcomer is blamed for a world that fails before its first step, unless there is a cut.
    has_new = any(node.new for node in world.nodes) and suspects.failed_early(state)
    return has_new and any(map(root_cause.waited_for_others, state.failures))


def _is_probing(state: RoundState) -> bool:
    """Return whether nodes of the last world still find out which others they can reach."""
    return any(
        present.member.probed < connectivity.required_probe(state, node.node)
        for node in the_world(state).nodes
        if (present := state.members.get(node.node)) is not None
        and not present.member.leaving
        and node.node not in state.refused
    )


def _to_drop(rules: RoundRules, state: RoundState) -> tuple[str, ...]:
    """The members whose machines refuse connections, and without which no state is lost: the nodes
    of the running world have it, or these members have none.

    Others that are free may lose it at any time, and a firewall may refuse in the name of all.
    """
    world = state.world
    refused = state.refused & state.members.keys()
    if not refused or (world is not None and world.phase == "over"):
        return ()
    training = world.members if world is not None and world.is_under_way else frozenset[str]()
    needed = holders_left_out(rules, state, training)
    return tuple(sorted(refused.difference(training, needed)))
