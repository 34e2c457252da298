"""Write tales.txt: short tales of a harbor town, made from a small grammar. Public domain (CC0).

    python examples/data/write_tales.py

The same text every time: the seed is fixed.
"""

import random
from pathlib import Path

TALES = 150

PEOPLE = {
    "Anna": "she",
    "Berta": "she",
    "Clara": "she",
    "Dora": "she",
    "Edda": "she",
    "Frida": "she",
    "Georg": "he",
    "Henrik": "he",
    "Ivo": "he",
    "Jonas": "he",
    "Konrad": "he",
    "Lorenz": "he",
}
OBJECT = {"she": "her", "he": "him"}
OWN = {"she": "her", "he": "his"}

WORDS = {
    "trade": ["baker", "ferryman", "clockmaker", "gardener", "weaver", "lamplighter", "carpenter"],
    "place": [
        "the old harbour",
        "the mill",
        "the long bridge",
        "the lighthouse",
        "the market square",
    ],
    "thing": ["lantern", "brass key", "wooden box", "letter", "small boat", "clock", "red scarf"],
    "season": ["In spring", "In early summer", "In autumn", "In the middle of winter", "One March"],
    "weather": [
        "the rain fell for three days and filled every bucket in the town",
        "the fog lay so thick on the water that the gulls walked home",
        "the wind came from the north and shook the windows of the sleeping houses",
        "the sun stood high and the stones of the quay were too hot to sit on",
        "the snow covered the boats until they looked like loaves of bread",
    ],
    "find": [
        "found a {thing} under the stairs",
        "saw a {thing} floating past the quay",
        "was given a {thing} by a stranger who would not say {own} name",
        "lost a {thing} somewhere between the church and {place}",
        "bought a {thing} for two coins and a cup of soup",
    ],
    "ask": [
        "What is it for",
        "Who left it there",
        "Why does nobody come to ask for it",
        "How long will it last",
        "Where does it belong",
    ],
    "answer": [
        "It belongs to whoever needs it most",
        "It was here before the town was",
        "Wait until the tide turns, and you will know",
        "Nothing is lost as long as one of us remembers it",
        "If one of us is gone, the others row on",
    ],
    "deed": [
        "carried it to {place} and set it down in the light",
        "cleaned it with sand and oil until it shone",
        "showed it to the children, who wanted to keep it",
        "wrote its story in the book that hangs in the town hall",
        "took it apart and put it together again, and one piece was left over",
    ],
    "setback": [
        "But at night the lamp went out, and they had to begin again.",
        "But the rope broke, and one of the rowers fell into the water.",
        "But the bridge was closed, and the way around it was long.",
        "But nobody had counted the steps, and so they counted them twice.",
        "But the man who knew the answer had left the town that morning.",
    ],
    "recovery": [
        "Nobody complained; they took up the work where it had stopped.",
        "Another one took the empty place, and the boat hardly slowed down.",
        "They knew where they had been, and so they did not lose their way.",
        "Those who remembered told those who did not, and all of them went on together.",
        "In the morning everything was as it had been, only the sea was calmer.",
    ],
    "moral": [
        "Since then the people there say that a town is a boat with many oars.",
        "And whoever walks past {place} in the evening can still see it.",
        "So it was, and so it is told, and nobody has told it differently.",
        "From that day on they kept a light burning, even when no ship was due.",
        "The sea said nothing, as it always does.",
    ],
}


class Teller:
    """Tells one tale after another."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def pick(self, kind, **names):
        """One phrase of a kind, its blanks filled in."""
        phrase = self.random.choice(WORDS[kind])
        blanks = {name: self.random.choice(WORDS[name]) for name in ("thing", "place")}
        return phrase.format(**{**blanks, **names})

    def tale(self, number):
        (first, one), (second, other) = self.random.sample(sorted(PEOPLE.items()), 2)
        names = {"thing": self.pick("thing"), "place": self.pick("place"), "own": OWN[one]}
        return "\n".join(
            [
                f"{number}. {first} and the {names['thing']}",
                "",
                f"{self.pick('season')} {self.pick('weather')}. {first} the {self.pick('trade')} "
                f"{self.pick('find', **names)}. {one.capitalize()} {self.pick('deed', **names)}.",
                "",
                f'"{self.pick("ask")}?" asked {second} the {self.pick("trade")}, who had followed '
                f"{OBJECT[one]} to {names['place']}.",
                "",
                f'"{self.pick("answer")}," said {first}, and {other} was content with that.',
                "",
                f"{self.pick('setback')} {self.pick('recovery')} {second} "
                f"{self.pick('deed', **names)}. {self.pick('moral', **names)}",
                "",
                "",
            ]
        )


def main():
    teller = Teller(seed=1)
    text = "\n".join(teller.tale(number) for number in range(1, TALES + 1))
    Path(__file__).with_name("tales.txt").write_text(text)


if __name__ == "__main__":
    main()
