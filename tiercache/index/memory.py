"""An index in dictionaries: what the other one means, in the fewest words. For tests and for simulation.

It shares no code with `lmdb.py` on purpose: a random history applied to both must leave both equal
(tests/index/test_model.py), and that test is worth something only while the two are written twice.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence

import msgspec
import trio

from tiercache.core.record import (
    ROOT_INODE,
    ChunkRecord,
    DirectoryState,
    Entry,
    HotRecord,
    Inode,
    Link,
    ObjectId,
    Pin,
)
from tiercache.index.index import (
    Change,
    DropChunk,
    DropDirectory,
    DropEntry,
    DropHot,
    DropPin,
    Health,
    PutChunk,
    PutDirectory,
    PutEntry,
    PutHot,
    PutPin,
    Touch,
)

FRESH = Health(epoch=1, trusted_epoch=1, unclean=False)


class MemoryIndex:
    """The `Index` protocol without a disk. `submit` applies at once; nothing is ever dropped."""

    def __init__(self, health: Health = FRESH) -> None:
        self.health = health
        self._links: dict[Inode, dict[bytes, Link]] = {}
        self._order: dict[Inode, list[bytes]] = {}
        self._inodes: dict[Inode, Entry] = {}
        self._superseded: set[Inode] = set()
        self._directories: dict[Inode, DirectoryState] = {}
        self._hot: dict[ObjectId, HotRecord] = {}
        self._chunks: dict[ObjectId, dict[int, ChunkRecord]] = {}
        self._pins: dict[tuple[str, str, bool], Pin] = {}

    def reopened(self, *, other_boot: bool) -> MemoryIndex:
        """What a successor finds after this index was lost without a clean mark (`other_boot`: the machine went down too)."""
        epoch = self.health.epoch + (1 if other_boot else 0)
        trusted = epoch if other_boot else self.health.trusted_epoch
        successor = MemoryIndex(Health(epoch=epoch, trusted_epoch=trusted, unclean=True))
        successor._links = {parent: dict(names) for parent, names in self._links.items()}
        successor._order = {parent: list(names) for parent, names in self._order.items()}
        successor._inodes = dict(self._inodes)
        successor._superseded = set(self._superseded)
        successor._directories = dict(self._directories)
        successor._hot = dict(self._hot)
        successor._chunks = {object_id: dict(chunks) for object_id, chunks in self._chunks.items()}
        successor._pins = dict(self._pins)
        return successor

    # namespace

    def link(self, parent: Inode, name: bytes) -> Link | None:
        return self._links.get(parent, {}).get(name)

    def entry(self, inode: Inode) -> Entry | None:
        return self._inodes.get(inode)

    def directory(self, inode: Inode) -> DirectoryState | None:
        return self._directories.get(inode)

    def names(self, parent: Inode, after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, Link]]:
        order = self._order.get(parent, [])
        start = bisect_right(order, after)
        links = self._links.get(parent, {})
        return [(name, links[name]) for name in order[start : start + limit]]

    def listing(self, parent: Inode, after: bytes = b"", limit: int = 1000) -> list[Entry]:
        return [self._inodes[link.inode] for _, link in self.names(parent, after, limit)]

    # hot tier

    def hot(self, object_id: ObjectId) -> HotRecord | None:
        return self._hot.get(object_id)

    def chunks(self, object_id: ObjectId) -> dict[int, ChunkRecord]:
        return dict(sorted(self._chunks.get(object_id, {}).items()))

    def sample_hot(self, count: int, rng: random.Random) -> list[HotRecord]:
        records = list(self._hot.values())
        return rng.sample(records, min(count, len(records)))

    def all_hot(self) -> Iterator[HotRecord]:
        return iter([self._hot[object_id] for object_id in sorted(self._hot)])

    def held_bytes(self, directory: int) -> int:
        return sum(record.held_bytes for record in self._hot.values() if record.directory == directory)

    def hot_count(self) -> int:
        return len(self._hot)

    def size_bytes(self) -> int:
        return 0

    # pins

    def pins(self) -> list[Pin]:
        return [self._pins[key] for key in sorted(self._pins)]

    # writing

    async def commit(self, changes: Sequence[Change], *, sync: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        self.submit(changes)

    def submit(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._apply(change)

    async def prune(self) -> int:
        await trio.lowlevel.checkpoint()
        doomed = set(self._superseded)
        doomed |= {parent for parent in self._links if parent != ROOT_INODE and parent not in self._inodes}
        forgotten = 0
        while doomed:
            inode = doomed.pop()
            self._order.pop(inode, None)
            doomed |= {link.inode for link in self._links.pop(inode, {}).values()}
            self._directories.pop(inode, None)
            self._superseded.discard(inode)
            forgotten += self._inodes.pop(inode, None) is not None
        return forgotten

    async def aclose(self, *, clean: bool) -> None:
        await trio.lowlevel.checkpoint()

    def _apply(self, change: Change) -> None:
        match change:
            case PutEntry() | DropEntry() | PutDirectory() | DropDirectory():
                self._apply_to_names(change)
            case PutPin(pin):
                self._pins[pin.dataset, pin.prefix, pin.exact] = pin
            case DropPin(dataset, prefix, exact):
                self._pins.pop((dataset, prefix, exact), None)
            case _:
                self._apply_to_hot(change)

    def _apply_to_names(self, change: PutEntry | DropEntry | PutDirectory | DropDirectory) -> None:
        match change:
            case PutEntry(entry, checked_seconds):
                links = self._links.setdefault(entry.parent, {})
                former = links.get(entry.name)
                if former is None:
                    insort(self._order.setdefault(entry.parent, []), entry.name)
                elif former.inode != entry.inode:
                    self._superseded.add(former.inode)
                links[entry.name] = Link(entry.inode, checked_seconds)
                self._inodes[entry.inode] = entry
                self._superseded.discard(entry.inode)
            case DropEntry(parent, name):
                gone = self._links.get(parent, {}).pop(name, None)
                if gone is not None:
                    self._order[parent].remove(name)
                    self._superseded.add(gone.inode)
                    if not self._links[parent]:
                        del self._links[parent], self._order[parent]
            case PutDirectory(inode, state):
                self._directories[inode] = state
            case DropDirectory(inode):
                self._directories.pop(inode, None)

    def _apply_to_hot(self, change: PutHot | PutChunk | DropChunk | DropHot | Touch) -> None:
        if isinstance(change, PutHot):
            self._hot[change.record.object_id] = change.record
            return
        record = self._hot.get(change.object_id)
        if record is None:
            return
        replace = msgspec.structs.replace
        match change:
            case PutChunk(object_id, chunk, chunk_record, held_bytes, completes):
                self._chunks.setdefault(object_id, {})[chunk] = chunk_record
                record = replace(record, held_bytes=record.held_bytes + held_bytes, complete=record.complete or completes)
            case DropChunk(object_id, chunk, held_bytes):
                if self._chunks.get(object_id, {}).pop(chunk, None) is None:
                    return
                record = replace(record, held_bytes=record.held_bytes - held_bytes, complete=False)
            case DropHot(object_id):
                del self._hot[object_id]
                self._chunks.pop(object_id, None)
                return
            case Touch(_, accessed_seconds, accesses):
                newest = max(record.accessed_seconds, accessed_seconds)
                record = replace(record, accessed_seconds=newest, access_count=record.access_count + accesses)
        self._hot[record.object_id] = record
