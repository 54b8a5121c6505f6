"""Listing directories: one listing at a time for each, shared by everybody, recorded page by page.

A listing goes on one page at a time for one of two reasons. Somebody *demands* it (opens the
directory, refreshes it): it runs to its end. Or lookups in the directory have paid for pages
(`core/freshness`): it takes as many as are paid for, at the background priority of the cold store, and rests; a
rest longer than the time to live makes it worthless and it starts anew. Demand takes over a resting listing that is young enough.

Pages are recorded as they arrive, so the first names of a large directory can be read at once. Names that
the listing did not show are dropped, and the directory counts as listed, only after its last page. A listing
that fails is forgotten as a whole; what it had recorded stays true, each name by itself. A failed listing in the background
is not reported to anyone: the next lookup or opendir asks the store itself and gets the error. Eight more lookups
must then pay before the next attempt.

An empty answer for a directory other than the root is ambiguous: a store has no empty directories, a `file://` source does. One
lookup in the parent tells, so that a deleted directory is ENOENT and not empty.

**Memory.** A running listing holds its names twice by reference (a list in order for the readers, a dictionary to tell what
vanished): measured 95 bytes a name with names of 12 bytes. A finished one leaves the list to the streams that read it.
"""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from tiercache.core.freshness import NEVER_SECONDS, pages_due, remaining_seconds
from tiercache.core.naming import FileName, Level, Named
from tiercache.core.record import Entry, Inode
from tiercache.engine.names import Names, Place
from tiercache.engine.recorder import Means, Recorder
from tiercache.errors import BadResponse, NotFound, TiercacheError, Unavailable

STREAM_BATCH = 256  # entries a read: the kernel takes some 30 at a time with attributes
MAX_RESTING = 64  # background listings that wait for more lookups; each holds the names it has seen
MAX_ACCOUNTS = 1024  # directories whose lookups are counted


class State(enum.Enum):
    RUNNING = enum.auto()
    ENDED = enum.auto()
    FAILED = enum.auto()


class Listing:
    """One pass over a directory. `order` grows as pages are recorded; a name comes once."""

    def __init__(self, place: Place, ticket: int, started_seconds: float) -> None:
        self.place = place
        self.ticket = ticket
        self.started_seconds = started_seconds
        self.level = Level(place.prefix)
        self.order: list[bytes] = []
        self.added: list[bytes] = []
        self.replaced: list[bytes] = []
        self.dropped: list[bytes] = []
        self.demanded = False
        self.ending = False
        self.token = ""
        self.unwritten: frozenset[bytes] = frozenset()
        self.state = State.RUNNING
        self.error: TiercacheError = Unavailable(f"the listing of {place.label} was interrupted: the daemon is stopping")
        self._moved = trio.Event()

    async def beyond(self, count: int) -> bool:
        """Wait until more than `count` names are there: False when the listing ended without. Raises its error."""
        while len(self.order) <= count and self.state is State.RUNNING:
            await self._moved.wait()
        if len(self.order) > count:
            return True
        self._raise_failure()
        return False

    async def moved(self) -> None:
        """Wait for the next page, the end, a failure or a rest."""
        await self._moved.wait()

    async def ended(self) -> None:
        """Wait for the end. Raises what ended it early."""
        while self.state is State.RUNNING:
            await self._moved.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.state is State.FAILED:
            raise copy.copy(self.error) from self.error

    def move(self, state: State = State.RUNNING) -> None:
        """Wake whoever waits for names or for the end."""
        self.state = state
        self._moved.set()
        self._moved = trio.Event()


@dataclass
class Account:
    """The ski-rental account of one directory."""

    lookups_count: int = 0
    pages_count: int = 0

    @property
    def due(self) -> bool:
        return self.pages_count < pages_due(self.lookups_count)


class Listings:
    """All running and resting listings.

    `exists(entry)` asks the store whether a directory that lists empty is there (NotFound when not).
    `ended(listing)` is told of each listing that came to its end.
    """

    def __init__(
        self,
        names: Names,
        recorder: Recorder,
        clock: Callable[[], float],
        nursery: trio.Nursery,
        *,
        exists: Callable[[Entry], Awaitable[Entry]],
        ended: Callable[[Listing], None],
    ) -> None:
        self._names = names
        self._recorder = recorder
        self._clock = clock
        self._nursery = nursery
        self._exists = exists
        self._ended = ended
        self._running: dict[Inode, Listing] = {}
        self._resting: OrderedDict[Inode, Listing] = OrderedDict()
        self._accounts: OrderedDict[Inode, Account] = OrderedDict()

    def confirmed(self, parent: Inode, name: bytes) -> list[float]:
        """When a listing that is not at its end yet has seen and recorded the name: one time, or none."""
        listing = self._running.get(parent) or self._resting.get(parent)
        if listing is None or name not in listing.level or name in listing.unwritten:
            return []
        return [listing.started_seconds]

    def demand(self, place: Place) -> Listing:
        """A listing of the directory that runs to its end: the present one if there is one."""
        listing = self._present(place)
        listing.demanded = True
        self._drive(listing)
        return listing

    async def anew(self, place: Place) -> Listing:
        """A listing that was started after this call, and runs to its end."""
        former = self._running.get(place.inode) or self._resting.get(place.inode)
        while former is not None and self._running.get(place.inode) is former:
            await former.moved()
        if former is not None and self._resting.get(place.inode) is former:
            del self._resting[place.inode]
        return self.demand(place)

    def paid(self, place: Place) -> None:
        """A lookup in the directory has cost a request: after some of them the directory is listed in the background."""
        if place.dataset.metadata_ttl_seconds == 0:
            return
        account = self._accounts.setdefault(place.inode, Account())
        self._accounts.move_to_end(place.inode)
        if len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        account.lookups_count += 1
        if account.due:
            self._drive(self._present(place))

    async def distrust(self, inode: Inode) -> None:
        """What a listing that is under way has seen of the directory proves nothing any more."""
        self._resting.pop(inode, None)
        listing = self._running.get(inode)
        if listing is None:
            return
        listing.started_seconds = NEVER_SECONDS
        while listing.ending and self._running.get(inode) is listing:
            await listing.moved()

    def _present(self, place: Place) -> Listing:
        running = self._running.get(place.inode)
        if running is not None:
            return running
        now = self._clock()
        resting = self._resting.pop(place.inode, None)
        if resting is not None and remaining_seconds(resting.started_seconds, place.dataset.metadata_ttl_seconds, now):
            return resting
        return Listing(place, self._recorder.ticket(), now)

    def _drive(self, listing: Listing) -> None:
        inode = listing.place.inode
        if inode not in self._running:
            self._running[inode] = listing
            self._nursery.start_soon(self._run, listing)

    async def _run(self, listing: Listing) -> None:
        inode = listing.place.inode
        outcome = State.FAILED
        try:
            while listing.state is State.RUNNING and (listing.demanded or self._is_due(inode)):
                await self._page(listing)
            outcome = listing.state
        except TiercacheError as error:
            listing.error = error
        finally:
            del self._running[inode]
            if outcome is State.RUNNING:
                self._rest(listing)
            else:
                self._accounts.pop(inode, None)
            listing.move(outcome)

    def _is_due(self, inode: Inode) -> bool:
        account = self._accounts.get(inode)
        return account is not None and account.due

    def _rest(self, listing: Listing) -> None:
        self._resting[listing.place.inode] = listing
        if len(self._resting) > MAX_RESTING:
            self._resting.popitem(last=False)

    async def _page(self, listing: Listing) -> None:
        place = listing.place
        if not listing.demanded:
            self._accounts[place.inode].pages_count += 1
        cold = place.dataset.cold if listing.demanded else place.dataset.background
        ticket, asked_seconds = self._recorder.ticket(), self._clock()
        page = await cold.list(place.prefix, delimiter=True, token=listing.token)
        if page.token and page.token == listing.token:
            raise BadResponse(f"the store gave the same page of {place.label} twice", hint="is the endpoint S3-compatible?")
        known_count, held = len(listing.level), listing.level.held
        found = listing.level.take(page)
        listing.unwritten = frozenset(named.name for named in found)
        late = [named for named in found if isinstance(named, FileName) and named.name in held]
        timely = [named for named in found if not (isinstance(named, FileName) and named.name in held)]
        await self._record(listing, late, listing.ticket, listing.started_seconds)
        await self._record(listing, timely, ticket, asked_seconds)
        listing.unwritten = frozenset()
        listing.order += _first_time(listing, found, len(listing.level) - known_count)
        listing.token = page.token
        if not page.token:
            await self._end(listing)
        listing.move(listing.state)

    async def _record(self, listing: Listing, found: Sequence[Named], ticket: int, asked_seconds: float) -> None:
        recorded = await self._recorder.record(
            listing.place, found, ticket=ticket, checked_seconds=asked_seconds, means=Means.PAGE
        )
        listing.added += recorded.added
        listing.replaced += recorded.replaced

    async def _end(self, listing: Listing) -> None:
        place = listing.place
        if not listing.level.exists and place.prefix != place.dataset.prefix:
            entry = self._names.entry(place.inode)
            if entry is None or (await self._exists(entry)).inode != place.inode:
                raise NotFound(f"directory {place.label} does not exist any more")
        listing.ending = True
        listing.dropped = await self._recorder.finish(
            place,
            listing.level,
            ticket=listing.ticket,
            started_seconds=listing.started_seconds,
            now_seconds=self._clock(),
        )
        listing.state = State.ENDED
        self._ended(listing)
        listing.level = Level(place.prefix)  # only streams hold it from now on, and they need the order alone


def _first_time(listing: Listing, found: Sequence[Named], new_count: int) -> list[bytes]:
    """The names of a page without those that came before and only turned out to be directories."""
    names = [named.name for named in found]
    if new_count == len(names):
        return names
    known = set(listing.order)
    return [name for name in names if name not in known]


class DirectoryStream(Protocol):
    """An open directory. `is_listed`: in the order in which the store lists it, else in that of the index."""

    is_listed: bool

    async def read(self, position: int) -> list[tuple[Entry, int]]:
        """Entries from `position` (0 is the start), each with the position that follows it; none at the end.

        Waits for the next page when a listing is running, and raises what ended the listing early after the names that
        came before. Any position that was given out may be read again.
        """


class ListedStream:
    """The names of a listing as it goes on; what they lead to is looked up when they are read."""

    is_listed = True

    def __init__(self, listing: Listing, names: Names) -> None:
        self._listing = listing
        self._names = names

    async def read(self, position: int) -> list[tuple[Entry, int]]:
        found: list[tuple[Entry, int]] = []
        parent = self._listing.place.inode
        while not found and await self._listing.beyond(position):
            part = self._listing.order[position : position + STREAM_BATCH]
            entries = [self._names.child(parent, name) for name in part]
            found = _positioned(entries, position)
            position += len(part)
        return found


class RememberedStream:
    """A directory that need not be listed: from the index, as far as it is read. Holds the names, for positions to stay true."""

    is_listed = False

    def __init__(self, names: Names, parent: Inode) -> None:
        self._names = names
        self._parent = parent
        self._order: list[bytes] = []

    async def read(self, position: int) -> list[tuple[Entry, int]]:
        found: list[tuple[Entry, int]] = []
        while not found:
            while len(self._order) < position:  # a successor's stream, that is asked to go on
                names, _ = self._names.children(self._parent, self._order[-1] if self._order else b"", STREAM_BATCH)
                if not names:
                    return found
                self._order += names
            part = self._order[position : position + STREAM_BATCH]
            if part:
                entries = [self._names.child(self._parent, name) for name in part]
            else:
                after = self._order[-1] if self._order else b""
                part, entries = self._names.children(self._parent, after, STREAM_BATCH)
                self._order += part
            if not part:
                break
            found = _positioned(entries, position)
            position += len(part)
        return found


class FixedStream:
    """The datasets of a mount."""

    is_listed = False

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    async def read(self, position: int) -> list[tuple[Entry, int]]:
        return _positioned(self._entries[position:], position)


def _positioned(entries: Sequence[Entry | None], start: int) -> list[tuple[Entry, int]]:
    """Entries with the positions after them; names that lead nowhere any more are passed over."""
    return [(entry, position) for position, entry in enumerate(entries, start + 1) if entry is not None]
