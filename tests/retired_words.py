"""Words of our own that the field has better ones for: a listener is not a reception."""

import re

#: Parts of identifiers that are no longer used.
IN_NAMES = re.compile(
    "belongings|canvass|carrier|crew|doings|flavour|gathering|grave|guest|hearsay|heir|herald|"
    "inquiry|keeping|knock|leash|lobby|meeting|narrator|nursery|outlet|predicament|presence|"
    "reception|reign|rumour|seat|shelf|slate|telling|vigil|whereabout"
)
#: Those of them that have no other sense in a text about training.
IN_PROSE = re.compile(
    r"\b(canvass|crew|doings|hearsay|heirs?|herald|leash|lobby|narrator|nursery|predicament|reign|"
    r"rumours?|slates?|vigil|whereabouts)\b",
    re.IGNORECASE,
)


def in_name(name: str) -> list[str]:
    """The retired words in an identifier."""
    words = (word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name))
    return [word for word in words if IN_NAMES.fullmatch(word.removesuffix("s"))]
