"""Rules of the product that can be taken away again: the simulation must notice each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchelastic.agent.lifecycle import script
from torchelastic.agent.lifecycle.node_state import Phase, Rejoin, ReportMember, WorkersGone
from torchelastic.rendezvous import choosing, decide, forming, majority, round_state
from torchelastic.rendezvous.embedded.ask_peers import Returns
from torchelastic.rendezvous.embedded.election import Poll, Search
from torchelastic.rendezvous.embedded.failover_state import Failover, FailoverState
from torchelastic.rendezvous.world import World

#: Sets an attribute, as `monkeypatch.setattr` does.
Set = Callable[[Any, str, Any], None]


def waiting_world_is_not_reported(change: Set) -> None:
    """V1: an idle node that sees a waiting world says nothing."""
    change(World, "has_ended", property(lambda world: world.phase == "over"))


def a_host_that_does_not_train_has_no_vote(change: Set) -> None:
    """V2: the electorate is the nodes of the world, and not its host."""

    def of_nodes(nodes: Any, host: str, *args: Any, **more: Any) -> majority.Electorate:
        return majority.Electorate(frozenset(nodes), host)

    change(majority, "electorate", of_nodes)


def a_leader_forgets_what_was_confirmed(change: Set) -> None:
    """It leads again after its own lease was lost, and counts electorates from before."""
    hosted = round_state.hosted
    change(
        round_state,
        "hosted",
        lambda *args, confirmed=-1, **more: hosted(*args, confirmed=-1, **more),
    )


def newcomers_do_not_see_the_world_of_an_earlier_host(change: Set) -> None:
    """So they never learn that its workers are in-process, and start none."""
    change(World, "is_under_way", property(lambda world: True))


def a_spare_node_cannot_host(change: Set) -> None:
    """Though it may be the only one left that has taken the last world up."""
    change(Failover, "_is_to_hold", lambda failover, world: failover._node in world.candidates)


def candidate_never_asks_for_later_term(change: Set) -> None:
    """Than the one in which somebody has voted for itself. Seldom noticed where nobody stands right
    after it has voted."""
    change(Returns, "latest_term", property(lambda returns: 0))
    voter_stands_all_the_same(change)


def candidate_in_vain_stands_again_at_once(change: Set) -> None:
    """And with slow answers at the same time, for ever."""
    turn = Poll.turn
    change(Poll, "turn", lambda poll, in_vain=0: turn(poll))


def voter_stands_all_the_same(change: Set) -> None:
    """In a later term, to which the host that it has elected yields."""
    is_our_turn = Search.is_our_turn
    change(Search, "is_our_turn", lambda it, poll, term, now: is_our_turn(it, poll, 1 << 30, now))


def only_the_winner_knows_that_its_world_is_confirmed(change: Set) -> None:
    """And if it is lost at once, those who voted for it wait for nodes without a say."""
    change(FailoverState, "told", lambda holding, asked: holding)


def resumed_node_forgets_addresses_of_others(change: Set) -> None:
    """Those who must agree, and are in no world that a host shows it: it never asks them."""
    change(FailoverState, "following", lambda holding, last: holding)


def holder_of_state_may_be_left_out(change: Set) -> None:
    """Of a world after one that never began."""
    change(choosing, "_prefer_holders", choosing._prefer_fast)


def holder_of_state_may_be_held_out(change: Set) -> None:
    for module in (choosing, forming, decide):
        change(module, "holders_left_out", lambda rules, state, chosen: [])


def a_replaced_worker_counts_as_if_it_had_the_state(change: Set) -> None:
    """And the replica of another node, which has all of it, is left out."""
    change(choosing, "_has_whole", lambda member, ranks, size: True)


def the_only_node_with_a_shard_may_move(change: Set) -> None:
    change(choosing, "_not_only_holders", lambda movable, members: list(movable))


def a_block_without_one_of_its_workers_is_in_the_world(change: Set) -> None:
    change(choosing, "_in_whole_replicas", lambda state, member, ranks, size: ranks)
    change(choosing.replicas, "whole_blocks", lambda ranks, size: [(rank,) for rank in ranks])


def nodes_are_in_the_order_in_which_they_came(change: Set) -> None:
    """Whatever their places in replicas."""
    change(forming, "in_world_order", lambda rules, state, chosen: chosen)


def a_node_takes_along_that_its_workers_are_in_process(change: Set) -> None:
    """To the next host, though a lost lease has ended them."""
    gone = script._gone

    def silent(state: Any, event: WorkersGone) -> Any:
        state, commands = gone(state, event)
        if any(isinstance(command, Rejoin) for command in commands):
            commands = [one for one in commands if one != ReportMember(NOT_IN_PROCESS)]
        return state, commands

    at = (Phase.STOPPING, WorkersGone)
    change(script, "TRANSITIONS", {**script.TRANSITIONS, at: silent})


NOT_IN_PROCESS = {"in_process": False, "standing": ()}
