"""A fast `dataclasses.replace` for records with many fields: it copies all fields at once.

Deciders return changed records thousands of times. For plain dataclasses only: without slots,
`InitVar` and `__post_init__`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:
    from dataclasses import fields

    def replace(record: Any, /, **changes: Any) -> Any:
        """Return a copy of the record with some fields changed and no cached properties."""
        known = _names(type(record))
        values = vars(record) | changes
        if len(values) > len(known):
            if unknown := changes.keys() - known:
                raise TypeError(f"No such fields: {', '.join(sorted(unknown))}.")
            for name in values.keys() - known:
                del values[name]
        made = object.__new__(type(record))
        object.__setattr__(made, "__dict__", values)  # works for frozen dataclasses, too
        return made

    @cache
    def _names(cls: type) -> frozenset[str]:
        return frozenset(field.name for field in fields(cls))
