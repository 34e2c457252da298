"""Replacement of slow nodes by spare ones. Pure.

`events.analysis.stragglers` finds slow nodes; `forming` chooses a world without them. The world
changes only if it does not become smaller. Among slow nodes, those of the world come first, or two
of them would change places forever.
"""

from __future__ import annotations

from torchelastic.rendezvous.forming import candidates, choose, in_order, workers
from torchelastic.rendezvous.round_state import RoundRules, RoundState, names_of, the_world


def why_to_replace(rules: RoundRules, state: RoundState) -> str:
    """Return why the running world should change; empty if it should not."""
    world = the_world(state)
    slow = holding_up(state)
    if not slow or state.done or state.finished >= 0:
        return ""
    chosen = choose(rules, in_order(candidates(state), world), state)
    staying = {offer.node for offer in chosen}
    giving = [node for node in slow if node not in staying]
    coming = [offer.node for offer in chosen if world.place(offer.node) is None]
    if not giving or not coming or workers(chosen) < world.size:
        return ""
    verb = "replaces" if len(coming) == 1 else "replace"
    return f"{names_of(state, coming)} {verb} slow {names_of(state, giving)}"


def holding_up(state: RoundState) -> list[str]:
    """The nodes of the world that are slow, in its order."""
    world = the_world(state)
    places = {node: place for node in state.slow if (place := world.place(node)) is not None}
    return sorted(places, key=places.__getitem__)
