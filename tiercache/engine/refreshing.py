"""`refresh`: believe nothing of a subtree that was learnt before now.

The path itself is asked for component by component. A directory at its end is listed, and below it
every directory that had been listed before; in one that was only looked into, each known name is set
to "never confirmed", so that its next lookup asks. The work is bounded by what the index knows below
the path, and goes WINDOW listings at a time. Names that now lead elsewhere, or nowhere, or that the kernel
may still hold to be absent, are returned: the kernel has its own cache of them.

A failure ends the refresh with its error. What was learnt until then stays, and the kernel drops what it
holds after its time to live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Container, Sequence

import msgspec

from tiercache.core.record import Entry, Inode, Kind
from tiercache.engine.listing import Listing, Listings
from tiercache.engine.names import Names, Place
from tiercache.engine.recorder import BATCH, Recorder
from tiercache.errors import NotFound

WINDOW = 8


class Refreshed(msgspec.Struct, frozen=True):
    """What a refresh found: names that are new or lead to something else, names that are gone.

    In a directory that had never been listed before, names that were not known do not count as new.
    `stale` are (parent inode, name) that the kernel must look up again.
    """

    changed_count: int
    dropped_count: int
    stale: list[tuple[Inode, bytes]]


class Refreshing:
    """One refresh. `anew` asks the store for one name now; `denied` are names the kernel may hold to be absent."""

    def __init__(
        self,
        names: Names,
        recorder: Recorder,
        listings: Listings,
        place: Callable[[Inode], Place],
        anew: Callable[[Place, bytes], Awaitable[Entry]],
        denied: Container[tuple[Inode, bytes]],
    ) -> None:
        self._names = names
        self._recorder = recorder
        self._listings = listings
        self._place = place
        self._anew = anew
        self._denied = denied
        self._changed_count = 0
        self._dropped_count = 0
        self._stale: list[tuple[Inode, bytes]] = []

    async def refresh(self, root: Entry, path: Sequence[bytes]) -> Refreshed:
        """Refresh what is at `path` below a dataset's root directory."""
        entry = root
        for name in path:
            known = self._names.child(entry.inode, name)
            try:
                entry = await self._component(self._place(entry.inode), name, known)
            except NotFound:
                if known is None:
                    raise
                self._dropped_count += 1
                self._stale.append((known.parent, name))
                return self._result()
        if entry.kind is Kind.DIRECTORY:
            await self._below(self._place(entry.inode))
        return self._result()

    def _result(self) -> Refreshed:
        return Refreshed(self._changed_count, self._dropped_count, self._stale)

    async def _component(self, place: Place, name: bytes, known: Entry | None) -> Entry:
        denied = (place.inode, name) in self._denied
        entry = await self._anew(place, name)
        if known is None or known.inode != entry.inode:
            self._changed_count += 1
            if known is not None or denied:
                self._stale.append((place.inode, name))
        return entry

    async def _below(self, top: Place) -> None:
        waiting = deque([top])
        while waiting:
            places = [waiting.popleft() for _ in range(min(WINDOW, len(waiting)))]
            running: list[tuple[Listing, bool]] = []
            for place in places:
                listed_before = self._names.directory(place.inode) is not None
                if place is top or listed_before:
                    running.append((await self._listings.anew(place), listed_before))
                else:
                    await self._listings.distrust(place.inode)
                    expired = await self._recorder.expire(place)
                    self._stale += [(place.inode, entry.name) for entry in expired]
            for listing, listed_before in running:
                await self._take(listing, listed_before)
            for place in places:
                waiting.extend(self._directories(place))

    async def _take(self, listing: Listing, listed_before: bool) -> None:
        parent = listing.place.inode
        try:
            await listing.ended()
        except NotFound:
            self._dropped_count += 1  # the directory itself went while this was running
            return
        self._changed_count += len(listing.replaced) + (len(listing.added) if listed_before else 0)
        self._dropped_count += len(listing.dropped)
        self._stale += [(parent, name) for name in (*listing.replaced, *listing.dropped)]
        self._stale += [(parent, name) for name in listing.added if (parent, name) in self._denied]

    def _directories(self, place: Place) -> list[Place]:
        """Known directories directly below."""
        found: list[Place] = []
        after = b""
        while batch := self._names.names(place.inode, after, BATCH):
            after = batch[-1]
            children = [self._names.child(place.inode, name) for name in batch]
            found += [
                Place(entry.inode, place.dataset, entry.key)
                for entry in children
                if entry is not None and entry.kind is Kind.DIRECTORY
            ]
        return found
