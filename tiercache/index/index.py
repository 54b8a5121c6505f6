"""The seam below the engine: what this node remembers. Implementations: `lmdb.py`, `memory.py`.

Reads are synchronous, microseconds, and called on the event loop; they see committed state only.
Writes are `Change` records, applied in order and all-or-nothing by the single writer. `commit` returns
when its changes are committed (readable, and safe against the death of this process);
`commit(sync=True)` also when they are on the disk (pins and other promises to the user). `submit`
queues changes that nobody waits for (last access, a committed chunk): it never blocks and never raises;
when its bounded queue is full the oldest `Touch` changes are dropped, never another kind.

The index is a cache: it may be thrown away at any time, and is then rebuilt from the tiers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from tiercache.core.record import ChunkRecord, DirectoryState, Entry, HotRecord, Inode, Link, ObjectId, Pin


class PutEntry(msgspec.Struct, frozen=True):
    """(entry.parent, entry.name) leads to `entry` from now on, confirmed at `checked_seconds`.

    A different inode that the name led to before is kept (open handles need it) and noted as superseded.
    """

    entry: Entry
    checked_seconds: float


class DropEntry(msgspec.Struct, frozen=True):
    """The name is gone from the namespace; its inode is kept and noted as superseded."""

    parent: Inode
    name: bytes


class PutDirectory(msgspec.Struct, frozen=True):
    inode: Inode
    state: DirectoryState


class DropDirectory(msgspec.Struct, frozen=True):
    """Forget that the directory was listed (its entries stay, each with its own `checked_seconds`)."""

    inode: Inode


class PutHot(msgspec.Struct, frozen=True):
    """Insert or replace the record of a hot object. Replaces only the record, not its chunks."""

    record: HotRecord


class PutChunk(msgspec.Struct, frozen=True):
    """A chunk was written and hashed: `held_bytes` are added to its record (0 when it only was verified again).

    Ignored when the object has no record (it was evicted meanwhile).
    """

    object_id: ObjectId
    chunk: int
    record: ChunkRecord
    held_bytes: int
    completes: bool


class DropChunk(msgspec.Struct, frozen=True):
    """A chunk's bytes turned out wrong: forget it, take `held_bytes` off, mark the object incomplete."""

    object_id: ObjectId
    chunk: int
    held_bytes: int


class DropHot(msgspec.Struct, frozen=True):
    """Forget a hot object with all its chunks."""

    object_id: ObjectId


class Touch(msgspec.Struct, frozen=True):
    """An object was opened or read: for eviction. Ignored when the object has no record."""

    object_id: ObjectId
    accessed_seconds: int
    accesses: int


class PutPin(msgspec.Struct, frozen=True):
    pin: Pin


class DropPin(msgspec.Struct, frozen=True):
    dataset: str
    prefix: str
    exact: bool


class Health(msgspec.Struct, frozen=True):
    """What opening the index found. `epoch` grows at every boot that did not follow a clean mark.

    `trusted_epoch`: chunks of an older epoch must be verified before their bytes are served.
    `rebuilt` says why the former index was set aside ('' when it was not), `recovered_count` how many
    objects came back from the sidecar log.
    """

    epoch: int
    trusted_epoch: int
    unclean: bool
    rebuilt: str = ""
    recovered_count: int = 0


Change = PutEntry | DropEntry | PutDirectory | DropDirectory | PutHot | PutChunk | DropChunk | DropHot | Touch | PutPin | DropPin


class Index(Protocol):
    health: Health

    # namespace
    def link(self, parent: Inode, name: bytes) -> Link | None: ...

    def entry(self, inode: Inode) -> Entry | None: ...

    def directory(self, inode: Inode) -> DirectoryState | None: ...

    def names(self, parent: Inode, after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, Link]]:
        """Names of a directory in byte order, those greater than `after`, at most `limit`."""

    # hot tier
    def hot(self, object_id: ObjectId) -> HotRecord | None: ...

    def chunks(self, object_id: ObjectId) -> dict[int, ChunkRecord]: ...

    def sample_hot(self, count: int, rng: random.Random) -> list[HotRecord]:
        """About `count` distinct records, chosen evenly: ids are hashes, so a seek to a random id is a fair draw."""

    def all_hot(self) -> Iterator[HotRecord]:
        """Every record, in id order, in bounded memory; usable from a thread of its own (not the event loop)."""

    def held_bytes(self, directory: int) -> int:
        """What all records of one hot directory hold; kept with every commit, not counted on demand."""

    def hot_count(self) -> int: ...

    def size_bytes(self) -> int:
        """What the index itself occupies on disk."""

    # pins
    def pins(self) -> list[Pin]: ...

    # writing
    async def commit(self, changes: Sequence[Change], *, sync: bool = False) -> None: ...

    def submit(self, changes: Sequence[Change]) -> None: ...

    async def prune(self) -> int:
        """Forget superseded inodes (only when no kernel can still know them: at a fresh mount); how many."""

    async def aclose(self, *, clean: bool) -> None:
        """Commit what is queued and close; `clean` writes the clean mark (the caller has synced the hot files)."""
