"""Writing down what the cold store said about names: entries, their inode numbers, and in which order.

**Order.** Several requests about one name may be in flight: a lookup, a page of a listing, a refresh. A store
is consistent, so what a *later started* request says is newer; but its answer may be written first. Every
request takes a ticket when it starts, and the ticket that last changed a name (or found it absent, or listed its
directory to the end) is remembered, so an older answer never undoes a newer one. Wall clocks are no use for
this, they step. The last MAX_REMEMBERED names are remembered, more than can change while a request is in
flight; if ever one is forgotten too early, an older version shows until its time to live ends, as it would
without the newer request. An older request whose word does not count waits until the newer one's is
committed, since its caller reads that next.

**Directories that go and come back** have the same inode, and what was known in them would come back too. So the known names
of a directory are dropped when it appears; and while it is gone nothing in it counts as known, for the kernel may
still hold its inode and ask. (Dropping all that is below when it goes would be unbounded work in a lookup.)

**Numbers.** `inode_number` gets the dataset's name, source and prefix as its dataset: a cache directory that is later
mounted over another bucket shares no directory, and so no "this was listed a minute ago", with the former. A
number that another file already has is passed over for the next attempt; those that are not committed
yet count too.

An entry that a page shows unchanged is not written again: a listing of 100,000 known names costs no write but its
own end. Except when an older answer about the name is under way: an object may have been replaced and put back in between.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import trio

from tiercache.core.freshness import NEVER_SECONDS
from tiercache.core.naming import DirectoryName, FileName, Level, Named, decode
from tiercache.core.record import DirectoryState, Entry, Inode, Kind, ObjectId, inode_number, object_id
from tiercache.engine.dataset import Dataset
from tiercache.engine.names import NameChange, Names, Place
from tiercache.index.index import DropDirectory, DropEntry, PutDirectory, PutEntry

UNNUMBERED = Inode(0)
MAX_REMEMBERED = 4096
MAX_ATTEMPTS = 16  # two files in 2^63 numbers collide once in a thousand millions of mounts; sixteen in a row never
SLICE = 128  # names handled between two interleaving points: 1 to 3 ms
BATCH = 1000

K = TypeVar("K", bound=Hashable)


def realm(dataset: Dataset) -> str:
    """What inode numbers of a dataset are made of besides path and version."""
    return "\0".join((dataset.name, dataset.source_id, dataset.prefix))


class Means(enum.Enum):
    """How an answer was got: one name was asked for, a page of its directory's listing, a page of a walk."""

    LOOKUP = enum.auto()
    PAGE = enum.auto()
    WALK = enum.auto()


@dataclass
class Recorded:
    """What one answer changed. `entries` are what the names lead to now, changed or not, in the order given."""

    entries: list[Entry] = field(default_factory=list)
    added: list[bytes] = field(default_factory=list)
    replaced: list[bytes] = field(default_factory=list)


class Recorder:
    def __init__(self, names: Names, outdated: Callable[[Entry], None]) -> None:
        """`outdated` is told of each file whose name leads elsewhere, before that is committed."""
        self._names = names
        self._outdated = outdated
        self._tickets = itertools.count(1)
        self._changed_by: OrderedDict[tuple[Inode, bytes], int] = OrderedDict()
        self._unborn: dict[Inode, Entry] = {}
        self._pending: dict[tuple[Inode, bytes], trio.Event] = {}
        self._listed_by: OrderedDict[Inode, int] = OrderedDict()
        self._paged_by: OrderedDict[Inode, int] = OrderedDict()
        self._doubted = 0
        self._asking: set[tuple[Inode, bytes]] = set()
        self._dead: OrderedDict[Inode, None] = OrderedDict()

    def ticket(self) -> int:
        """The place of a request in time. Taken before the request is sent."""
        return next(self._tickets)

    @contextmanager
    def asking(self, parent: Inode, name: bytes) -> Iterator[int]:
        """The ticket of a lookup that is under way: a page that finds the name unchanged meanwhile says so to its answer."""
        self._asking.add((parent, name))
        try:
            yield self.ticket()
        finally:
            self._asking.discard((parent, name))

    def entry_for(self, place: Place, named: Named) -> Entry:
        """The entry of a name as the store shows it now; its number is reserved until `record` has committed it."""
        if isinstance(named, DirectoryName):
            return self._numbered(place.dataset, _directory(place, named.name, f"{place.prefix}{decode(named.name)}/"))
        listed = named.listed
        identity = object_id(place.dataset.source_id, listed.key, listed.version)
        draft = Entry(
            UNNUMBERED,
            place.inode,
            named.name,
            Kind.FILE,
            place.dataset.name,
            listed.key,
            listed.version,
            listed.size_bytes,
            listed.mtime_seconds,
            identity,
            listed.archived,
        )
        return self._numbered(place.dataset, draft)

    def root_entry(self, dataset: Dataset, parent: Inode, name: bytes) -> Entry:
        """The entry of a dataset's own directory."""
        return self._numbered(dataset, _directory(Place(parent, dataset, dataset.prefix), name, dataset.prefix))

    def _numbered(self, dataset: Dataset, draft: Entry) -> Entry:
        path = draft.key[len(dataset.prefix) :].removesuffix("/")
        for attempt in range(MAX_ATTEMPTS):
            number = inode_number(realm(dataset), path, draft.version, attempt)
            holder = self._unborn.get(number) or self._names.entry(number)
            if holder is None or _same_file(holder, draft):
                return msgspec.structs.replace(draft, inode=number)
        raise AssertionError(f"{MAX_ATTEMPTS} inode numbers of {dataset.name}/{path} are all taken")

    async def record(
        self, place: Place, named: Sequence[Named], *, ticket: int, checked_seconds: float, means: Means
    ) -> Recorded:
        """Write down that the names exist, as the request `ticket` saw them at `checked_seconds`; committed on return.

        What a lookup asked for is written also when it did not change, so that it is confirmed by itself.
        """
        recorded = Recorded()
        puts: list[tuple[Entry, Entry | None]] = []
        try:
            for start in range(0, len(named), SLICE):
                if start:
                    await trio.lowlevel.checkpoint()
                part = named[start : start + SLICE]
                links = self._names.links(place.inode, [item.name for item in part])
                for item in part:
                    link = links.get(item.name)
                    former = None if link is None else self._names.entry(link.inode)
                    entry = self._unchanged(former, item) or self.entry_for(place, item)
                    recorded.entries.append(entry)
                    if entry is not former:
                        self._unborn[entry.inode] = entry
                    if entry is not former or means is Means.LOOKUP or self._is_moving(place.inode, item.name):
                        puts.append((entry, former))
            if means is Means.PAGE and self._paged_by.get(place.inode, 0) < ticket:
                _keep_latest(self._paged_by, place.inode, ticket)
            elif means is Means.WALK and self._paged_by.get(place.inode, 0) > ticket:
                puts.clear()
            for entry, former in puts:
                if entry.kind is Kind.DIRECTORY and (former is None or former.kind is Kind.FILE):
                    await self._bury(entry.inode, ticket)
            await self._put(place, puts, recorded, ticket, checked_seconds)
        finally:
            for entry in recorded.entries:
                self._unborn.pop(entry.inode, None)
        return recorded

    def _unchanged(self, former: Entry | None, item: Named) -> Entry | None:
        """The known entry when the store still shows the same: its number and id need not be computed again."""
        if former is None:
            return None
        if isinstance(item, FileName):
            listed = item.listed
            same = (
                former.kind is Kind.FILE
                and former.version == listed.version
                and former.key == listed.key
                and former.mtime_seconds == listed.mtime_seconds
                and former.archived == listed.archived
            )
        else:
            same = former.kind is Kind.DIRECTORY
        return former if same else None

    async def _put(
        self,
        place: Place,
        puts: Sequence[tuple[Entry, Entry | None]],
        recorded: Recorded,
        ticket: int,
        checked_seconds: float,
    ) -> None:
        changes: list[NameChange] = []
        newer: list[bytes] = []
        for entry, former in puts:
            if self._is_newer(place.inode, entry.name, ticket):
                newer.append(entry.name)
                continue
            if former is None:
                recorded.added.append(entry.name)
            elif former.inode != entry.inode:
                recorded.replaced.append(entry.name)
                if former.kind is Kind.DIRECTORY:
                    changes.append(DropDirectory(former.inode))
            changes.append(PutEntry(entry, checked_seconds if ticket > self._doubted else NEVER_SECONDS))
        await self._commit(changes, ticket)
        await self._settled(place.inode, newer)

    async def drop(self, place: Place, name: bytes, ticket: int) -> None:
        """The request `ticket` saw that the name does not exist."""
        if self._is_newer(place.inode, name, ticket):
            await self._settled(place.inode, [name])
            return
        former = self._names.child(place.inode, name)
        if former is not None or (place.inode, name) in self._pending:
            await self._commit([DropEntry(place.inode, name)] if former is None else _drop(former), ticket)
        else:
            _keep_latest(self._changed_by, (place.inode, name), ticket)

    async def finish(self, place: Place, level: Level, *, ticket: int, started_seconds: float, now_seconds: float) -> list[bytes]:
        """A listing came to its end: drop the names that it did not show, then keep that it was listed.

        A name that was confirmed by another request after the listing had started is younger than the listing, and
        stays. A request older than the listing has no say from now on: its answer would be taken for confirmed by the listing.
        """
        _keep_latest(self._listed_by, place.inode, ticket)
        await self._settled(place.inode, [name for parent, name in self._pending if parent == place.inode])
        dropped: list[bytes] = []
        after = b""
        while batch := self._names.names(place.inode, after, BATCH):
            after = batch[-1]
            changes: list[NameChange] = []
            for name in batch:
                if name in level or (former := self._names.child(place.inode, name)) is None:
                    continue
                if self._is_younger(place.inode, name, ticket, started_seconds, now_seconds):
                    continue
                dropped.append(name)
                changes.extend(_drop(former))
            await trio.lowlevel.checkpoint()
            await self._commit(changes, ticket)
        state = DirectoryState(started_seconds, len(level), level.unreachable_count, level.example)
        await self._names.commit([PutDirectory(place.inode, state)])
        return dropped

    async def _bury(self, directory: Inode, ticket: int) -> None:
        """A directory is about to appear (again): what was known in it stems from its former life."""
        while batch := self._names.names(directory, b"", BATCH):
            known = [entry for name in batch if (entry := self._names.child(directory, name)) is not None]
            if not known:
                return
            changes = [change for entry in known for change in _drop(entry)]
            await self._commit([DropDirectory(directory), *changes], ticket)

    def is_dead(self, directory: Inode) -> bool:
        """Whether the directory, or one above it, has gone and not come back: what is known in it proves nothing."""
        if not self._dead:
            return False
        while directory not in self._dead:
            entry = self._names.entry(directory)
            if entry is None or entry.parent == directory:
                return False
            directory = entry.parent
        return True

    def _live_or_die(self, changes: Sequence[NameChange]) -> None:
        for change in changes:
            match change:
                case PutEntry(entry):
                    self._dead.pop(entry.inode, None)
                    self._die(self._names.child(entry.parent, entry.name), entry.inode)
                case DropEntry(parent, name):
                    self._die(self._names.child(parent, name), UNNUMBERED)

    def _die(self, former: Entry | None, successor: Inode) -> None:
        if former is None or former.inode == successor:
            return
        if former.kind is Kind.FILE:
            self._outdated(former)
            return
        self._dead[former.inode] = None
        if len(self._dead) > MAX_REMEMBERED:
            self._dead.popitem(last=False)

    def doubt(self) -> None:
        """From now on no answer to a request of before now confirms anything."""
        self._doubted = self.ticket()

    async def expire(self, place: Place) -> list[Entry]:
        """All known names of a directory must be asked for again; the entries. Call `doubt` before."""
        await self._settled(place.inode, [name for parent, name in self._pending if parent == place.inode])
        if self._names.directory(place.inode) is not None:
            await self._names.commit([DropDirectory(place.inode)])
        expired: list[Entry] = []
        after = b""
        while batch := self._names.names(place.inode, after, BATCH):
            after = batch[-1]
            still = [name for name in batch if (place.inode, name) not in self._pending]
            known = [entry for name in still if (entry := self._names.child(place.inode, name)) is not None]
            await self._names.commit([PutEntry(entry, NEVER_SECONDS) for entry in known])
            expired.extend(known)
        return expired

    def _is_newer(self, parent: Inode, name: bytes, ticket: int) -> bool:
        """Whether a request that was started after `ticket` has had its say about the name."""
        return max(self._changed_by.get((parent, name), 0), self._listed_by.get(parent, 0)) > ticket

    def _is_younger(self, parent: Inode, name: bytes, ticket: int, started_seconds: float, now_seconds: float) -> bool:
        if self._changed_by.get((parent, name), 0) > ticket:
            return True
        link = self._names.link(parent, name)
        return link is not None and started_seconds < link.checked_seconds <= now_seconds

    def _is_moving(self, parent: Inode, name: bytes) -> bool:
        """Whether an older answer about the name is on its way: that nothing changed must then be written, to outlive it."""
        return (parent, name) in self._asking or (parent, name) in self._pending

    async def _commit(self, changes: Sequence[NameChange], ticket: int) -> None:
        if not changes:
            return
        self._live_or_die(changes)
        committed = trio.Event()
        keys = [key for change in changes for key in _name_of(change)]
        for key in keys:
            self._pending[key] = committed
            _keep_latest(self._changed_by, key, ticket)
        try:
            await self._names.commit(changes)
        finally:
            committed.set()
            for key in keys:
                if self._pending.get(key) is committed:
                    del self._pending[key]

    async def _settled(self, parent: Inode, names: Sequence[bytes]) -> None:
        """Wait until what a newer request said about the names can be read."""
        for name in names:
            committed = self._pending.get((parent, name))
            if committed is not None:
                await committed.wait()


def _keep_latest(tickets: OrderedDict[K, int], key: K, ticket: int) -> None:
    tickets[key] = ticket
    tickets.move_to_end(key)
    if len(tickets) > MAX_REMEMBERED:
        tickets.popitem(last=False)


def _name_of(change: NameChange) -> list[tuple[Inode, bytes]]:
    match change:
        case PutEntry(entry):
            return [(entry.parent, entry.name)]
        case DropEntry(parent, name):
            return [(parent, name)]
    return []


def _directory(place: Place, name: bytes, key: str) -> Entry:
    """Directories have no version and no time of their own: 0 never changes."""
    return Entry(UNNUMBERED, place.inode, name, Kind.DIRECTORY, place.dataset.name, key, "", 0, 0, ObjectId(b""))


def _same_file(one: Entry, other: Entry) -> bool:
    return (one.dataset, one.kind, one.key, one.version) == (other.dataset, other.kind, other.key, other.version)


def _drop(former: Entry) -> list[NameChange]:
    changes: list[NameChange] = [DropEntry(former.parent, former.name)]
    if former.kind is Kind.DIRECTORY:
        changes.append(DropDirectory(former.inode))
    return changes
