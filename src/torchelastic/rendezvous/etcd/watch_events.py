"""What a watch has told and is to tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from torchelastic.rendezvous.store import Change, Listing


class Feed:
    """The changes under a prefix, each once, in order.

    etcd forgets old changes when it is told to (compaction). A watch that asks for some of them
    starts anew from a listing then; what is missing there has been deleted. For that the feed
    keeps the names of all keys its caller can know of.
    """

    def __init__(self, prefix: str, after: int, known: Iterable[str]) -> None:
        self.prefix = prefix
        self.seen = after
        self._known = {key for key in known if key.startswith(prefix)}

    def take(self, changes: Iterable[Change]) -> list[Change]:
        """Those that are news."""
        news = [change for change in changes if change.revision > self.seen]
        for change in news:
            # Only now: several changes may have one revision, as when a lease ends.
            self.seen = change.revision
            if change.item is None:
                self._known.discard(change.key)
            else:
                self._known.add(change.key)
        return news

    def catch_up(self, listing: Listing) -> list[Change]:
        """What a listing tells that the changes in between did not: the last of each key."""
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
