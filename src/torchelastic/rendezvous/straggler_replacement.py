"""Whether nodes that hold up the others give their places to spare ones. Pure.

Who is slow is found out elsewhere (`events.stragglers`); who would be in a world without them, if
anybody can do without, is what `forming` says. A world is changed for it only if it does not become
smaller; and among slow nodes those of the world have precedence, or two of them would change places
for ever.
"""

from __future__ import annotations

from torchelastic.rendezvous.forming import candidates, choose, in_order, workers
from torchelastic.rendezvous.round_state import RoundRules, RoundState, names_of, the_world


def why_to_replace(rules: RoundRules, state: RoundState) -> str:
    """Why the running world is to be changed; empty if it is not."""
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
