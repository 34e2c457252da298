"""The round: which world comes next. Pure: members and time in, the next world out.

The leader keeps a `RoundState`, changes it by `seen`, `lost` and `published`, and asks `decide`
after every change and at every `wake_at`. The world's phases:

    waiting ──enough ready, settled──▶ agreeing ──a majority has it──▶ running ──all done──▶ closed
       ▲                                                                  │
       │                                              worker failure, node failure, leave, resize
       │ fewer than min                                                   ▼
       └──────────────── gone everywhere ◀───────────────────────────── over ──giving up──▶ closed

Only with the embedded rendezvous is a world agreed on, where that takes more than its host.

Workers of a new generation start only when every member that is alive and stays has said that its
workers of the old one are gone: nobody reads a checkpoint that an old worker is still writing, and
no two worlds make progress at once.
"""

from __future__ import annotations

from torchelastic.errors import EXIT_FAILED
from torchelastic.events.failure import Failure, node_failure
from torchelastic.records import replace
from torchelastic.rendezvous import root_cause, suspects
from torchelastic.rendezvous.forming import SAY_EVERY, candidates, form, newcomers_to, settled_at
from torchelastic.rendezvous.restart_policy import Ending, Kind, Verdict, judge, pause, why_pause
from torchelastic.rendezvous.round_state import (
    Decision,
    RoundRules,
    RoundState,
    failed_alike,
    follows_later_host,
    has_trained,
    names_of,
    the_world,
    to_claim,
)
from torchelastic.rendezvous.straggler_replacement import why_to_replace
from torchelastic.rendezvous.world import World

#: How many consequences of a failure are told.
CONSEQUENCES = 32
_GONE = "its connection or lease ended without notice"


def decide(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """Decide what to do in this state."""
    world = state.world
    if world is None or world.phase == "waiting":
        return form(rules, state, now, at_once=False)
    if world.phase == "running":
        return _watch(rules, state, now)
    if world.phase == "over":
        return succeed(rules, state, now)
    return Decision()


def waits_for_checkpoint(rules: RoundRules, state: RoundState) -> bool:
    """Return whether the checkpoint path must be watched: only while newcomers wait for one."""
    return rules.grow.when == "after-checkpoint" and bool(newcomers_to(rules, state))


# --- running -------------------------------------------------------------------------------------


def _watch(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """End a running world after success, a failure, a leave, or for newcomers."""
    world = the_world(state)
    if all(node.node in state.done for node in world.nodes):
        return success(state)
    cause, _ = blame(state)
    if cause is not None and cause.is_node:
        return over_by(state, "node-failure", f"{names_of(state, state.lost)} failed")
    if cause is not None:
        return over_by(state, "failure", cause.sentence())
    if leaving := _leavers(state):
        reason = state.members[leaving[0]].member.leaving
        return over_by(state, "leave", f"{names_of(state, leaving)} leaves ({reason})")
    if left := departed(state):
        return over_by(state, "leave", f"{names_of(state, left)} has left")
    if reason := why_to_replace(rules, state):
        return over_by(state, "resize", reason)
    return consider_growth(rules, state, now)


def _leavers(state: RoundState) -> list[str]:
    """The nodes of the world that have announced a leave and are still here."""
    return [
        node.node
        for node in the_world(state).nodes
        if node.node in state.members and state.members[node.node].member.leaving
    ]


def departed(state: RoundState) -> list[str]:
    """The nodes of the world that left without having been seen leaving: their announcement and
    their end became known at once."""
    left = state.left - state.done
    return [node.node for node in the_world(state).nodes if node.node in left] if left else []


def success(state: RoundState) -> Decision:
    """The job is done."""
    reason = "every worker succeeded"
    world = replace(the_world(state), phase="closed", reason=reason, cause=None, consequences=())
    return Decision(world)


def consider_growth(rules: RoundRules, state: RoundState, now: float) -> Decision:
    newcomers = newcomers_to(rules, state)
    if not newcomers or state.done:  # work that is finished is not done again for a newcomer
        return Decision()
    at = settled_at(rules, state, newcomers, len(candidates(state)))
    if rules.grow.when == "every":
        at = max(at, state.running_since + rules.grow.seconds)
    if rules.grow.when == "after-checkpoint" and not state.checkpoint:
        return Decision()
    if now < at:
        return Decision(wake_at=at)
    return over_by(state, "resize", f"{names_of(state, newcomers)} joins")


def blame(state: RoundState) -> tuple[Failure | None, tuple[Failure, ...]]:
    """The first failure of the generation, of a worker or a node, and its consequences."""
    return root_cause.pick(state.failures, _lost(state))


def _lost(state: RoundState) -> list[Failure]:
    generation = the_world(state).generation
    gone = state.lost[:CONSEQUENCES]
    return [node_failure(names_of(state, [node]), generation, _GONE) for node in gone]


def over_by(state: RoundState, kind: Kind, reason: str) -> Decision:
    cause, consequences = blame(state)
    world = replace(
        the_world(state),
        phase="over",
        ending=kind,
        saver=next(iter(_leavers(state)), ""),
        after=None,
        reason=reason,
        cause=cause,
        consequences=brief(consequences),
    )
    return Decision(world, kind)


def brief(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """A short form of the consequences for all nodes: one line each, and not thousands."""
    return tuple(
        replace(failure, traceback="", log_lines=()) for failure in failures[:CONSEQUENCES]
    )


# --- over ----------------------------------------------------------------------------------------


def succeed(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """Continue, wait or end, once the old workers are gone on all nodes."""
    world = the_world(state)
    slow = [node.node for node in world.nodes if holds_up(state, node.node, world.generation)]
    if slow:
        return wait_for_stop(state, slow, now)
    kind, cause, consequences = classify(state)
    failure = cause if cause is None or not cause.is_node else None
    found = suspects.find(rules, state, failure, consequences)
    failed = failed_alike(state, failure) if failure is not None else frozenset()
    if found.instead:
        verdict = Verdict(True, world.ledger, "")  # not charged
    else:
        verdict = judge(
            Ending(
                kind=kind,
                lifetime=state.since - state.running_since,
                failure=failure,
                step=state.step,
                trained=world.proven or has_trained(state),
                everywhere=failure is not None and failed >= world.members,
                without=bool(failed) and failed <= found.out,
            ),
            world.ledger,
            budget=rules.max_restarts,
            count_resizes=rules.count_resizes,
        )
    said = [found.instead or why(state, kind, cause), verdict.sentence]
    if verdict.go_on:
        said.append(found.sentence)
    state = replace(
        state,
        world=replace(
            world,
            ledger=verdict.ledger,
            cause=cause,
            consequences=brief(consequences),
            reason="; ".join(filter(None, said)),
            held=found.held,
        ),
        out=state.out & {one.node for one in found.held if one.seconds} | found.out,
    )
    if not verdict.go_on:
        return Decision(replace(the_world(state), phase="closed", exitcode=EXIT_FAILED), kind)
    if now < state.since + pause(verdict.ledger):
        return _pause(state, world, verdict)
    return replace(form(rules, state, now, at_once=True), kind=kind)


def _pause(state: RoundState, world: World, verdict: Verdict) -> Decision:
    """Wait before the next world, and say why; `world` is charged only once, when the time is
    up."""
    cause = the_world(state).cause
    reason = why_pause(verdict.ledger)
    if cause is not None:
        reason = f"{cause.sentence()}; {reason}"
    if world.reason != reason:
        return Decision(replace(world, reason=reason), world.ending)
    return Decision(wake_at=state.since + pause(verdict.ledger))


def wait_for_stop(state: RoundState, slow: list[str], now: float) -> Decision:
    """Say repeatedly whose workers do not stop, while all wait for them."""
    at = state.said_at + SAY_EVERY
    if now < at:
        return Decision(wake_at=at)
    reason = f"waiting for the workers of {names_of(state, slow)} to stop"
    return Decision(replace(the_world(state), reason=reason), the_world(state).ending)


def holds_up(state: RoundState, node: str, generation: int) -> bool:
    """Return whether a node is a member, stays, and still has workers of the old generation.

    A leaving node is waited for only if no node stays, or its vote is needed: after one node has
    stopped, the others of the world cannot make a step without it.
    """
    present = state.members.get(node)
    if present is None or present.member.gone >= generation or follows_later_host(state):
        return False
    if not present.member.leaving:
        return True
    stays = any(
        other.node in state.members and not state.members[other.node].member.leaving
        for other in the_world(state).nodes
    )
    return not stays or to_claim(state) is None


def classify(state: RoundState) -> tuple[Kind, Failure | None, tuple[Failure, ...]]:
    """Find out what really ended the generation, after all nodes have reported.

    The collectives of the survivors fail a few milliseconds before a dead node's connection is
    given up: their errors must not be taken, and charged, for the cause.
    """
    cause, consequences = blame(state)
    ending = the_world(state).ending or "failure"
    if cause is not None and cause.is_node:
        return "node-failure", cause, consequences
    if cause is not None and not root_cause.is_consequence(cause):
        return "error" if cause.alive else "failure", cause, consequences
    if ending == "failure" and not _leaving(state):
        return "failure", cause, consequences
    return ("leave" if _leaving(state) else ending), None, state.failures


def _leaving(state: RoundState) -> bool:
    """Return whether a node of the world is leaving, or has left, after saying so."""
    return any(
        node.node not in state.members or state.members[node.node].member.leaving
        for node in the_world(state).nodes
        if node.node not in state.lost
    )


def why(state: RoundState, kind: Kind, cause: Failure | None) -> str:
    """The sentence that says what ended a generation."""
    if kind == "node-failure" and state.lost:
        return f"{names_of(state, state.lost)} failed"
    if kind in ("failure", "error") and cause is not None:
        if cause.alive and root_cause.waited_for_others(cause):
            return f"rank {cause.rank} on {cause.node} lost a peer"  # which one is not known yet
        return cause.sentence()
    return the_world(state).reason
