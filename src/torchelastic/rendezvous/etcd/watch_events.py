"""The changes that a watch has delivered and those it has not. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from torchelastic.rendezvous.store import Change, Listing


class WatchEvents:
    """The changes under a prefix, each once, in order.

    etcd forgets old changes after a compaction. A watch that asks for such changes restarts from a
    listing; a key missing there has been deleted. To detect that, this keeps the names of all keys
    that its caller may know.
    """

    def __init__(self, prefix: str, after: int, known: Iterable[str]) -> None:
        self.prefix = prefix
        self.seen = after
        self._known = {key for key in known if key.startswith(prefix)}

    def take(self, changes: Iterable[Change]) -> list[Change]:
        """The new changes."""
        news = [change for change in changes if change.revision > self.seen]
        for change in news:
            # Only after all of them: several changes may have one revision, as when a lease ends.
            self.seen = change.revision
            if change.item is None:
                self._known.discard(change.key)
            else:
                self._known.add(change.key)
        return news

    def catch_up(self, listing: Listing) -> list[Change]:
        """The changes between the last one delivered and a listing: the last of each key."""
        put = [
            Change(key, item, item.modified)
            for key, item in listing.items.items()
            if item.modified > self.seen
        ]
        put.sort(key=lambda change: change.revision)
        gone = [
            Change(key, None, listing.revision) for key in sorted(self._known - set(listing.items))
        ]
        self.seen = listing.revision
        self._known = set(listing.items)
        return [*put, *gone]
