"""What this node knows of the namespace: the index, and a bounded memory for when the disk of the index fails.

An inode number means nothing to the daemon unless its entry is kept somewhere, so a full or failing cache
disk would make every new name unusable, though its bytes could well be streamed from below. Therefore a
commit that the index refuses with HotSick is kept here, in front of the index, until the same name is committed
again, or its directory is listed again. When MAX_KEPT names are held the error is passed on: an honest EIO instead of
names that vanish. That a directory was listed is never kept here, so such a directory is simply listed again.

An index read costs some 5 us, most of it for the transaction, and a small cold file costs ten of them between listing and open.
This is the only writer of names, so what was read or written lately is remembered (`_Lately`): links, entries, and when a
directory was listed, which every lookup asks. A page of a listing reads its links in one scan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from tiercache.core.record import DirectoryState, Entry, Inode, Link
from tiercache.engine.dataset import Dataset
from tiercache.errors import HotSick
from tiercache.index.index import DropDirectory, DropEntry, Index, PutDirectory, PutEntry

MAX_STATES = 4096
MAX_REMEMBERED = 8192  # names; some 5 MB of memory
MIN_SCAN = 8  # names for which one scan is cheaper than a read each
MAX_KEPT = 100_000  # some 50 MB of memory, used only while the disk of the index fails

NameChange = PutEntry | DropEntry | PutDirectory | DropDirectory


class Place(msgspec.Struct, frozen=True):
    """A directory, and where its names come from: the prefix that lists it ('' or ending in '/')."""

    inode: Inode
    dataset: Dataset
    prefix: str

    @property
    def path(self) -> str:
        """Below the dataset, '' or ending in '/'."""
        return self.prefix[len(self.dataset.prefix) :]

    @property
    def label(self) -> str:
        """For messages: 'dataset/path/'."""
        return f"{self.dataset.name}/{self.path}"


class _Lately:
    """Names of which the index is known to have just this, those that were remembered first forgotten first.

    While a commit is under way nobody can tell which state a read has met, so nothing is remembered then; nor what was written by
    one of several at once, which may come back in any order. What a cancelled commit may have changed is never remembered again:
    it may still happen.
    """

    def __init__(self) -> None:
        self.links: dict[tuple[Inode, bytes], Link] = {}
        self.entries: dict[Inode, Entry] = {}
        self._commits_count = 0  # under way
        self._begun_count = 0
        self._unsure_links: set[tuple[Inode, bytes]] = set()
        self._unsure_entries: set[Inode] = set()

    def link(self, parent: Inode, name: bytes, link: Link) -> None:
        key = (parent, name)
        if not self._commits_count and key not in self._unsure_links:
            self.links[key] = link
            if len(self.links) > MAX_REMEMBERED:
                del self.links[next(iter(self.links))]

    def entry(self, entry: Entry) -> None:
        if not self._commits_count and entry.inode not in self._unsure_entries:
            self.entries[entry.inode] = entry
            if len(self.entries) > MAX_REMEMBERED:
                del self.entries[next(iter(self.entries))]

    @contextmanager
    def changing(self, changes: Sequence[NameChange]) -> Iterator[None]:
        """The block commits them, raises HotSick when it did not, or is cancelled."""
        is_alone = not self._commits_count
        self._commits_count += 1
        self._begun_count += 1
        number, is_known = self._begun_count, False
        try:
            yield
            is_known = True
        except HotSick:
            is_known, is_alone = True, False
            raise
        finally:
            self._commits_count -= 1
            for change in changes:
                match change:
                    case PutEntry(entry):
                        self._forget((entry.parent, entry.name), entry.inode, is_known)
                    case DropEntry(parent, name):
                        self._forget((parent, name), None, is_known)
        for change in changes if is_alone and number == self._begun_count else ():
            match change:
                case PutEntry(entry, checked_seconds):
                    self.link(entry.parent, entry.name, Link(entry.inode, checked_seconds))
                    self.entry(entry)
                case DropEntry(parent, name):
                    self.links.pop((parent, name), None)

    def _forget(self, key: tuple[Inode, bytes], inode: Inode | None, is_known: bool) -> None:
        self.links.pop(key, None)
        if inode is not None:
            self.entries.pop(inode, None)
        if not is_known:
            self._unsure_links.add(key)
            if inode is not None:
                self._unsure_entries.add(inode)


class Names:
    def __init__(self, index: Index) -> None:
        self._index = index
        self._lately = _Lately()
        self._links: dict[tuple[Inode, bytes], Link] = {}
        self._gone: set[tuple[Inode, bytes]] = set()
        self._entries: dict[Inode, Entry] = {}
        self._unlisted: set[Inode] = set()
        self._states: OrderedDict[Inode, DirectoryState | None] = OrderedDict()
        self._unsure: set[Inode] = set()

    def link(self, parent: Inode, name: bytes) -> Link | None:
        if (parent, name) in self._gone:
            return None
        found = self._links.get((parent, name)) or self._lately.links.get((parent, name))
        if found is None and (found := self._index.link(parent, name)) is not None:
            self._lately.link(parent, name, found)
        return found

    def entry(self, inode: Inode) -> Entry | None:
        found = self._entries.get(inode) or self._lately.entries.get(inode)
        if found is None and (found := self._index.entry(inode)) is not None:
            self._lately.entry(found)
        return found

    def child(self, parent: Inode, name: bytes) -> Entry | None:
        """The entry that a name leads to."""
        link = self.link(parent, name)
        return None if link is None else self.entry(link.inode)

    def directory(self, inode: Inode) -> DirectoryState | None:
        """When a directory was listed, or None when it was not."""
        if inode in self._unlisted:
            return None
        if inode in self._unsure:
            return self._index.directory(inode)
        if inode not in self._states:
            self._states[inode] = self._index.directory(inode)
            if len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        return self._states[inode]

    def names(self, parent: Inode, after: bytes, limit: int) -> list[bytes]:
        """Names that the index has under a directory, in byte order; the marker of its source (b'') is none."""
        return [name for name, _ in self._index.names(parent, after, limit) if name]

    def children(self, parent: Inode, after: bytes, limit: int) -> tuple[list[bytes], list[Entry | None]]:
        """Those names, and what each leads to."""
        found = [row for row in self._index.names(parent, after, limit) if row[0]]
        if self._links or self._gone:
            return [name for name, _ in found], [self.child(parent, name) for name, _ in found]
        return [name for name, _ in found], [self.entry(link.inode) for _, link in found]

    def links(self, parent: Inode, names: Sequence[bytes]) -> dict[bytes, Link]:
        """The links of those names that have one: by one scan over their range, as far as it reaches."""
        if len(names) < MIN_SCAN or self._links or self._gone:
            return {name: link for name in names if (link := self.link(parent, name)) is not None}
        limit = 2 * len(names)
        scanned = self._index.names(parent, just_before(min(names)), limit)
        found = dict(scanned)
        if len(scanned) == limit:
            reached = scanned[-1][0]
            found.update({name: link for name in names if name > reached and (link := self.link(parent, name)) is not None})
        return found

    async def commit(self, changes: Sequence[NameChange]) -> None:
        """Returns when the changes can be read here. Raises HotSick when neither the index nor the memory takes them."""
        relisted = [change.inode for change in changes if isinstance(change, PutDirectory | DropDirectory)]
        self._unsure.update(relisted)
        owed = self._owed({change.inode for change in changes if isinstance(change, PutDirectory)})
        try:
            with self._lately.changing([*owed, *changes]):
                await self._index.commit([*owed, *changes])
        except HotSick:
            if len(self._entries) + len(self._gone) + len(changes) > MAX_KEPT:
                raise
            self._keep(changes)
        else:
            self._forget([*owed, *changes])
        for inode in relisted:  # not when cancelled: then nobody knows when the index will have it
            self._states.pop(inode, None)
            self._unsure.discard(inode)

    def _owed(self, listed: Collection[Inode]) -> list[NameChange]:
        """What is kept of directories that will count as listed: the index then answers for them, and must know all of it."""
        puts = [
            PutEntry(self._entries[link.inode], link.checked_seconds)
            for (parent, _), link in self._links.items()
            if parent in listed
        ]
        return [*puts, *(DropEntry(parent, name) for parent, name in self._gone if parent in listed)]

    def _keep(self, changes: Sequence[NameChange]) -> None:
        for change in changes:
            match change:
                case PutEntry(entry, checked_seconds):
                    self._links[entry.parent, entry.name] = Link(entry.inode, checked_seconds)
                    self._gone.discard((entry.parent, entry.name))
                    self._entries[entry.inode] = entry
                case DropEntry(parent, name):
                    self._links.pop((parent, name), None)
                    self._gone.add((parent, name))
                case DropDirectory(inode) | PutDirectory(inode):
                    self._unlisted.add(inode)

    def _forget(self, changes: Sequence[NameChange]) -> None:
        if not (self._entries or self._gone or self._unlisted):
            return
        for change in changes:
            match change:
                case PutEntry(entry):
                    self._drop_kept(entry.parent, entry.name)
                    self._entries.pop(entry.inode, None)
                case DropEntry(parent, name):
                    self._drop_kept(parent, name)
                case DropDirectory(inode) | PutDirectory(inode):
                    self._unlisted.discard(inode)

    def _drop_kept(self, parent: Inode, name: bytes) -> None:
        """A superseded entry stays in `_entries`: open handles need it, as in the index."""
        self._links.pop((parent, name), None)
        self._gone.discard((parent, name))


def just_before(name: bytes) -> bytes:
    """A string below `name` with practically no name in between (names hold no NUL, so the last byte can be lowered)."""
    return name[:-1] + bytes([name[-1] - 1]) + b"\xff" * 8
