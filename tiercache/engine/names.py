"""What this node knows of the namespace: the index, and a bounded memory for when the disk of the index fails.

An inode number means nothing to the daemon unless its entry is kept somewhere, so a full or failing cache
disk would make every new name unusable, though its bytes could well be streamed from below. Therefore a
commit that the index refuses with HotSick is kept here, in front of the index, until the same name is committed
again, or its directory is listed again. When MAX_KEPT names are held the error is passed on: an honest EIO instead of
names that vanish. That a directory was listed is never kept here, so such a directory is simply listed again.

An index read costs some 5 us, most of it for the transaction. Every lookup asks when its directory was
listed, so those answers are remembered (this is their only writer): a fresh lookup takes 8 us instead of 15. A page of
a listing reads its links in one scan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

from tiercache.core.record import DirectoryState, Entry, Inode, Link
from tiercache.engine.dataset import Dataset
from tiercache.errors import HotSick
from tiercache.index.index import DropDirectory, DropEntry, Index, PutDirectory, PutEntry

MAX_STATES = 4096
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


class Names:
    def __init__(self, index: Index) -> None:
        self._index = index
        self._links: dict[tuple[Inode, bytes], Link] = {}
        self._gone: set[tuple[Inode, bytes]] = set()
        self._entries: dict[Inode, Entry] = {}
        self._unlisted: set[Inode] = set()
        self._states: OrderedDict[Inode, DirectoryState | None] = OrderedDict()
        self._unsure: set[Inode] = set()

    def link(self, parent: Inode, name: bytes) -> Link | None:
        if (parent, name) in self._gone:
            return None
        return self._links.get((parent, name)) or self._index.link(parent, name)

    def entry(self, inode: Inode) -> Entry | None:
        return self._entries.get(inode) or self._index.entry(inode)

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
