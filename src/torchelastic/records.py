"""`dataclasses.replace` for records with many fields: it copies them all at once.

Deciders are asked thousands of times, and each answer is a changed record. For plain dataclasses
only: without slots, `InitVar` and `__post_init__`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:
    from dataclasses import fields

    def replace(record: Any, /, **changes: Any) -> Any:
        """The record with other values in some fields, and without its cached properties."""
        known = _names(type(record))
        values = vars(record) | changes
        if len(values) > len(known):
            if unknown := changes.keys() - known:
                raise TypeError(f"No such fields: {', '.join(sorted(unknown))}.")
            for name in values.keys() - known:
                del values[name]
        made = object.__new__(type(record))
        object.__setattr__(made, "__dict__", values)  # which a frozen one does not let others do
        return made

    @cache
    def _names(cls: type) -> frozenset[str]:
        return frozenset(field.name for field in fields(cls))
