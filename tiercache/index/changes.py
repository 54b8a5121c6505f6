"""What each `Change` does to the tables: straight-line steps inside one write transaction.

A transaction is run again from the start when the map had to grow, so everything that it works out (totals, pins,
what goes to the log) lives in an `Applying`, which is made anew for each attempt and looked at only after the commit.

Totals are kept, never counted: `held_bytes` per hot directory and `hot_count` move with each record that is put or
dropped and are stored in the same transaction. The check in a child process compares them with a real count.
"""

from __future__ import annotations

import msgspec

from tiercache.core.record import ROOT_INODE, HotRecord, Inode, Link, ObjectId, Pin
from tiercache.index.environment import View
from tiercache.index.index import (
    Change,
    DropChunk,
    DropDirectory,
    DropEntry,
    DropHot,
    DropPin,
    PutChunk,
    PutDirectory,
    PutEntry,
    PutHot,
    PutPin,
    Touch,
)
from tiercache.index.records import (
    CHUNKS,
    DIRECTORIES,
    ENTRIES,
    HOT,
    INODE_BYTES,
    INODES,
    META,
    META_KEY,
    PINS,
    SUPERSEDED,
    Mark,
    Meta,
    chunk_key,
    entry_key,
    inode_key,
    pin_key,
)
from tiercache.index.sidecar import encode_object, encode_pin, encode_unpin

LAST_KEY = b"\xff" * (INODE_BYTES + 1)
"""Greater than every inode key: a scan for parents that begins here finds nothing."""

replace = msgspec.structs.replace


class PruneStep(msgspec.Struct, frozen=True):
    """One bounded step of forgetting. First looks through `entries` from `parent_from` on for directories that have
    no record of their own any more, then forgets what is superseded; touches at most about `budget` records.
    """

    parent_from: bytes
    budget: int


class Pruned(msgspec.Struct, frozen=True):
    """`next` is the step to go on with, or None when nothing is left."""

    forgotten_count: int
    next: PruneStep | None


class Applying:
    """One attempt at one transaction. `meta` and `pins` are what they are after it; `logged` are frames for the sidecar log."""

    def __init__(self, view: View, meta: Meta, pins: dict[bytes, Pin]) -> None:
        self._view = view
        self._before = meta
        self._held = dict(meta.held_bytes)
        self._hot_count = meta.hot_count
        self.meta = meta
        self.pins = dict(pins)
        self.logged: list[bytes] = []

    def finish(self) -> None:
        """Store the totals, if they moved. The last step of the transaction."""
        held = {directory: held for directory, held in self._held.items() if held}
        self.meta = replace(self._before, held_bytes=held, hot_count=self._hot_count)
        if self.meta != self._before:
            self._view.put(META, META_KEY, self.meta)

    def apply(self, change: Change) -> None:
        match change:
            case PutEntry():
                self._put_entry(change)
            case DropEntry():
                self._drop_entry(change)
            case PutDirectory(inode, state):
                self._view.put(DIRECTORIES, inode_key(inode), state)
            case DropDirectory(inode):
                self._view.delete(DIRECTORIES, inode_key(inode))
            case PutHot(record):
                self._put_hot(record)
            case PutChunk():
                self._put_chunk(change)
            case DropChunk():
                self._drop_chunk(change)
            case DropHot(object_id):
                self._drop_hot(object_id)
            case Touch():
                self._touch(change)
            case PutPin(pin):
                self._put_pin(pin)
            case DropPin():
                self._drop_pin(change)

    # namespace

    def _put_entry(self, change: PutEntry) -> None:
        entry = change.entry
        key = entry_key(entry.parent, entry.name)
        former = self._view.get(ENTRIES, key)
        if former is not None and former.inode != entry.inode:
            self._supersede(former.inode)
        self._view.put(ENTRIES, key, Link(entry.inode, change.checked_seconds))
        self._view.delete(SUPERSEDED, inode_key(entry.inode))
        if self._view.get(INODES, inode_key(entry.inode)) != entry:
            self._view.put(INODES, inode_key(entry.inode), entry)

    def _drop_entry(self, change: DropEntry) -> None:
        key = entry_key(change.parent, change.name)
        former = self._view.get(ENTRIES, key)
        if former is not None:
            self._view.delete(ENTRIES, key)
            self._supersede(former.inode)

    def _supersede(self, inode: Inode) -> None:
        self._view.put(SUPERSEDED, inode_key(inode), Mark())

    def prune(self, step: PruneStep) -> Pruned:
        parent_from, left = self._orphans(step.parent_from, step.budget)
        forgotten = 0
        while left > 0:
            doomed = next(self._view.scan(SUPERSEDED, b""), None)
            if doomed is None:
                break
            left = self._forget_names_of(doomed[0], left)
            if left > 0:
                forgotten += self._view.delete(INODES, doomed[0])
                self._view.delete(DIRECTORIES, doomed[0])
                self._view.delete(SUPERSEDED, doomed[0])
                left -= 1
        return Pruned(forgotten, PruneStep(parent_from, step.budget) if left <= 0 else None)

    def _orphans(self, parent_from: bytes, left: int) -> tuple[bytes, int]:
        """Supersede directories that have names in them and no record; where to go on, and what is left of the budget."""
        root = inode_key(ROOT_INODE)
        while left > 0:
            found = next(self._view.scan(ENTRIES, parent_from), None)
            if found is None:
                return LAST_KEY, left
            parent = found[0][:INODE_BYTES]
            if parent != root and not self._view.has(INODES, parent):
                self._view.put(SUPERSEDED, parent, Mark())
            parent_from = (int.from_bytes(parent, "big") + 1).to_bytes(INODE_BYTES, "big")
            left -= 1
        return parent_from, left

    def _forget_names_of(self, parent: bytes, left: int) -> int:
        while left > 0:
            found = next(self._view.scan(ENTRIES, parent, parent), None)
            if found is None:
                return left
            self._view.delete(ENTRIES, found[0])
            self._supersede(found[1].inode)
            left -= 1
        return left

    # hot tier

    def _put_hot(self, record: HotRecord) -> None:
        self._store_hot(self._view.get(HOT, record.object_id), record)
        if record.complete:
            self._log_object(record)

    def _put_chunk(self, change: PutChunk) -> None:
        record = self._view.get(HOT, change.object_id)
        if record is None:
            return
        self._view.put(CHUNKS, chunk_key(change.object_id, change.chunk), change.record)
        if change.held_bytes or (change.completes and not record.complete):
            held_bytes = record.held_bytes + change.held_bytes
            after = replace(record, held_bytes=held_bytes, complete=record.complete or change.completes)
            self._store_hot(record, after)
            if after.complete and not record.complete:
                self._log_object(after)

    def _drop_chunk(self, change: DropChunk) -> None:
        record = self._view.get(HOT, change.object_id)
        if record is not None and self._view.delete(CHUNKS, chunk_key(change.object_id, change.chunk)):
            self._store_hot(record, replace(record, held_bytes=record.held_bytes - change.held_bytes, complete=False))

    def _drop_hot(self, object_id: ObjectId) -> None:
        record = self._view.get(HOT, object_id)
        if record is None:
            return
        for key in [key for key, _ in self._view.scan(CHUNKS, object_id, object_id)]:
            self._view.delete(CHUNKS, key)
        self._view.delete(HOT, object_id)
        self._count(record, -1)

    def _touch(self, change: Touch) -> None:
        record = self._view.get(HOT, change.object_id)
        if record is not None:
            newest = max(record.accessed_seconds, change.accessed_seconds)
            after = replace(record, accessed_seconds=newest, access_count=record.access_count + change.accesses)
            self._store_hot(record, after)

    def _store_hot(self, before: HotRecord | None, after: HotRecord) -> None:
        if before is not None:
            self._count(before, -1)
        self._view.put(HOT, after.object_id, after)
        self._count(after, 1)

    def _count(self, record: HotRecord, sign: int) -> None:
        self._hot_count += sign
        self._held[record.directory] = self._held.get(record.directory, 0) + sign * record.held_bytes

    def _log_object(self, record: HotRecord) -> None:
        frame = encode_object(record, self._view.scan(CHUNKS, record.object_id, record.object_id))
        if frame is not None:
            self.logged.append(frame)

    # pins

    def _put_pin(self, pin: Pin) -> None:
        key = pin_key(pin.dataset, pin.prefix, pin.exact)
        self._view.put(PINS, key, pin)
        self.pins[key] = pin
        self.logged.append(encode_pin(pin))

    def _drop_pin(self, change: DropPin) -> None:
        key = pin_key(change.dataset, change.prefix, change.exact)
        if self._view.delete(PINS, key):
            del self.pins[key]
            self.logged.append(encode_unpin(change))
