"""The round for resident workers, which outlive their generation. Pure.

A world whose workers have all called `torchelastic.train` is resident. It ends in one of two ways:

    by a failure   running ──▶ over ──every worker has stopped──▶ the next world
    by agreement   running ──▶ pausing ──every worker has said its step──▶ the next world

No worker is stopped for a newcomer or a leave: each worker reports the step it has entered and
enters no other; all run through the largest of these steps before they enter the next world. A
failure in the meantime cancels the pause.
"""

from __future__ import annotations

from torchelastic.errors import EXIT_FAILED
from torchelastic.events.failure import Failure
from torchelastic.records import replace
from torchelastic.rendezvous import script_round as script
from torchelastic.rendezvous.forming import SAY_EVERY, form, newcomers_to
from torchelastic.rendezvous.restart_policy import Kind
from torchelastic.rendezvous.round_state import (
    Decision,
    RoundRules,
    RoundState,
    can_be_settled,
    names_of,
    next_let_in,
    the_world,
    with_holds,
)
from torchelastic.rendezvous.straggler_replacement import why_to_replace


def decide(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """Decide what to do in this state, for both kinds of workers."""
    state = with_holds(state, now)
    decision = _let_in_later(state, _decide(rules, state, now))
    if decision.world is not None and decision.world.base != state.base:
        return replace(decision, world=replace(decision.world, base=state.base))
    if decision.world is None and _is_base_news(state):
        return Decision(replace(the_world(state), base=state.base))
    return decision


def _let_in_later(state: RoundState, decision: Decision) -> Decision:
    """Ask again when a node that is held out may come back."""
    at = next_let_in(state)
    if at is None or decision.world is not None:
        return decision
    return Decision(wake_at=at if decision.wake_at is None else min(at, decision.wake_at))


def _is_base_news(state: RoundState) -> bool:
    """Return whether nodes outside the world still have to learn its base from the leader."""
    world = state.world
    if world is None or world.phase != "running" or world.base == state.base:
        return False
    return any(world.place(node) is None for node in state.members)


def _decide(rules: RoundRules, state: RoundState, now: float) -> Decision:
    world = state.world
    if world is None or not world.nodes:
        return script.decide(rules, state, now)
    if world.phase == "agreeing":
        return _await_agreement(state, now)
    if not world.resident:
        if world.phase == "running" and _have_all_enlisted(state):
            return Decision(replace(world, resident=True))
        if world.phase == "running" and _have_some_gone_home(state):
            reason = "some nodes exited without calling torchelastic.train while others wait in it"
            return Decision(replace(world, phase="closed", exitcode=EXIT_FAILED, reason=reason))
        return script.decide(rules, state, now)
    if world.phase == "running":
        return _watch(rules, state, now)
    if world.phase == "pausing":
        return _await_answers(rules, state, now)
    if world.phase == "over":
        return _end(rules, state, now)
    if world.phase == "waiting":
        return _give_up(state) or form(rules, state, now, at_once=True)
    return Decision()


def _await_agreement(state: RoundState, now: float) -> Decision:
    """Begin once enough nodes have taken up the world; end it if one of its nodes, or too many of
    those that had to agree, are gone before: the job then says that it waits for them."""
    world = the_world(state)
    if state.lost:
        return script.over_by(state, "node-failure", f"{names_of(state, state.lost)} failed")
    leaving = _leaving(state)
    if leaving:
        return script.over_by(state, "leave", f"{names_of(state, leaving)} leaves")
    if state.roll is None or not state.roll.before:
        return Decision(replace(world, phase="running"))
    at = state.since + SAY_EVERY
    if now >= at or not can_be_settled(state):
        reason = f"too few nodes of the last world confirmed generation {world.generation}"
        return script.over_by(state, "node-failure", reason)
    return Decision(wake_at=at)


def _have_all_enlisted(state: RoundState) -> bool:
    nodes = (node.node for node in the_world(state).nodes)
    return not state.failures and all(
        node in state.members and state.members[node].member.resident for node in nodes
    )


def _have_some_gone_home(state: RoundState) -> bool:
    """Return whether some nodes wait for others that have already finished."""
    members = state.members.values()
    return bool(state.done) and any(present.member.resident for present in members)


# --- running -------------------------------------------------------------------------------------


def _watch(rules: RoundRules, state: RoundState, now: float) -> Decision:
    ended = _broken(state)
    if ended is not None:
        return ended
    leaving = _leaving(state)
    if leaving:
        why = state.members[leaving[0]].member.leaving
        return _pause(state, "leave", f"{names_of(state, leaving)} leaves ({why})")
    if left := script.departed(state):
        return script.over_by(state, "leave", f"{names_of(state, left)} has left")
    if reason := why_to_replace(rules, state):
        return _pause(state, "resize", reason)
    growth = script.consider_growth(rules, state, now)
    if growth.world is not None:
        return _pause(state, "resize", _who_comes(rules, state))
    return growth


def _who_comes(rules: RoundRules, state: RoundState) -> str:
    world = the_world(state)
    coming = newcomers_to(rules, state)
    nodes = [node for node in coming if world.place(node) is None]
    if nodes:
        return f"{names_of(state, nodes)} joins"
    return f"a replacement on {names_of(state, coming)} is ready"


def _broken(state: RoundState) -> Decision | None:
    """The end of a generation that cannot continue."""
    if state.finished >= 0:
        done = script.over_by(state, "finished", "training is done").world
        assert done is not None
        return Decision(replace(done, after=state.finished - 1), "finished")
    if state.failures:
        kind, cause, _ = script.classify(state)
        return script.over_by(state, kind, script.why(state, kind, cause))
    if state.lost:
        return script.over_by(state, "node-failure", f"{names_of(state, state.lost)} failed")
    return None


def _leaving(state: RoundState) -> list[str]:
    return [
        node.node
        for node in the_world(state).nodes
        if node.node in state.members and state.members[node.node].member.leaving
    ]


def _pause(state: RoundState, kind: Kind, reason: str) -> Decision:
    return Decision(replace(the_world(state), phase="pausing", ending=kind, reason=reason), kind)


# --- pausing -------------------------------------------------------------------------------------


def _await_answers(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """Once every worker has reported its step, form the next world from the largest of them on."""
    world = the_world(state)
    ended = _broken(state)
    if ended is not None:
        return ended
    if not all(node.node in state.members for node in world.nodes):
        return script.over_by(state, "leave", world.reason)  # gone before the boundary
    members = [state.members[node.node].member for node in world.nodes]
    if not all(member.paused == world.generation for member in members):
        return Decision()
    return _go_on_after(rules, state, max(member.entered for member in members), now)


def _go_on_after(rules: RoundRules, state: RoundState, step: int, now: float) -> Decision:
    world = the_world(state)
    formed = form(rules, state, now, at_once=True)
    if formed.world is None:
        return formed  # no node has a store yet, but one is on its way
    if formed.world.phase not in ("running", "agreeing"):
        return Decision(replace(world, phase="over", after=step), world.ending)
    leaving = tuple(n.node for n in world.nodes if formed.world.place(n.node) is None)
    following = replace(formed.world, after=step, reason=world.reason)
    return Decision(following.with_nodes(following.nodes, leaving), world.ending)


# --- over ----------------------------------------------------------------------------------------


def _end(rules: RoundRules, state: RoundState, now: float) -> Decision:
    world = the_world(state)
    if world.ending == "finished":
        return _finish(state, now)
    if world.after is not None:  # its workers run through a step, if nothing comes between
        broken = _broken(state)
        if broken is not None:
            return broken
    return script.succeed(rules, state, now)


def _give_up(state: RoundState) -> Decision | None:
    """End a job that would wait forever for a worker that cannot start."""
    fatal = [failure for failure in state.failures if failure.fatal]
    if not fatal:
        return None
    reason = f"{fatal[0].sentence()}: a replacement cannot start"
    world = replace(the_world(state), phase="closed", exitcode=EXIT_FAILED, cause=fatal[0])
    return Decision(replace(world, reason=reason), "failure")


def _finish(state: RoundState, now: float) -> Decision:
    """Training is done; what the scripts do afterwards decides how the job ends.

    A node that is lost now may be cut off and come back: its scripts continue meanwhile.
    """
    world = the_world(state)
    state = replace(state, lost=tuple(_still_lost(state)))
    if state.lost and (waiting := _await_return(state, now)) is not None:
        return waiting
    cause, consequences = script.blame(replace(state, failures=_dead(state)))
    if cause is not None:
        what = f"{names_of(state, state.lost)} failed" if cause.is_node else cause.sentence()
        closed = replace(
            world,
            phase="closed",
            exitcode=EXIT_FAILED,
            cause=cause,
            consequences=script.brief(consequences),
            reason=f"after training was done: {what}",
        )
        return Decision(closed, "failure")
    staying = [node.node for node in world.nodes if node.node in state.members]
    if all(node in state.done for node in staying):
        return script.success(state)
    return Decision()


def _still_lost(state: RoundState) -> list[str]:
    return [node for node in state.lost if node not in state.members]


def _await_return(state: RoundState, now: float) -> Decision | None:
    """Wait for lost nodes; None after waiting long enough, or if another node has failed."""
    world = the_world(state)
    reason = f"training is done; waiting for {names_of(state, state.lost)} to come back"
    if _dead(state):
        return None
    if world.reason != reason:
        return Decision(replace(world, reason=reason), "finished")
    at = state.said_at + SAY_EVERY
    return Decision(wake_at=at) if now < at else None


def _dead(state: RoundState) -> tuple[Failure, ...]:
    """Workers that died after training. A living worker only reports that others have gone: they
    had nothing left to train."""
    new = (item for item in state.failures if item not in state.forgiven)
    return tuple(item for item in new if not item.alive)
