"""The index on disk: LMDB below, one writer thread beside, reads inline.

    opening.py    any state of the files -> an open environment         cleanmark.py  "stopped in order"
    check.py      is the file sound? (child process)                    sidecar.py    objects.log, for recovery
    environment.py  LMDB itself: map, transactions, errors              compaction.py keeps that log small
    records.py    tables, keys, checksummed values                      changes.py    what a Change does to them
    queue.py, writer.py   group commit

Why reads are inline: a record takes about 3 us, a thread 100 us and more, and the map is in memory (it is read ahead at
opening). What is longer than microseconds is bounded: `names` and `listing` by their limit, `all_hot` takes the read lock
for `ALL_HOT_BATCH` records at a time, and `chunks` of an object of thousands of chunks costs a microsecond a chunk.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import trio

from tiercache.core.record import OBJECT_ID_BYTES, ChunkRecord, DirectoryState, Entry, HotRecord, Inode, Link, ObjectId, Pin
from tiercache.errors import HotSick
from tiercache.index.changes import PruneStep
from tiercache.index.cleanmark import write_mark
from tiercache.index.environment import DATA_NAME, View
from tiercache.index.index import Change
from tiercache.index.opening import Exists, Opened, open_in_any_state
from tiercache.index.records import CHUNKS, DIRECTORIES, ENTRIES, HOT, INODE_BYTES, INODES, entry_key, inode_key
from tiercache.index.sidecar import LOG_NAME, ObjectLog
from tiercache.index.writer import Writer

INITIAL_MAP_BYTES = 1 << 30
TOUCH_SECONDS = 1.0
ALL_HOT_BATCH = 256
PRUNE_BUDGET = 2_000
"""Records a pruning step touches: tens of milliseconds of the writer, between which others get their turn."""


async def open_index(
    directory: Path,
    *,
    boot_id: str,
    exists: Exists,
    map_bytes: int = INITIAL_MAP_BYTES,
    touch_seconds: float = TOUCH_SECONDS,
) -> LmdbIndex:
    """Open or make the index in `directory`, which the caller has locked against other processes.

    `boot_id` names the running kernel (/proc/sys/kernel/random/boot_id). `exists` says whether a logged object's hot file is
    there with its full size; it is asked only when a damaged index is rebuilt, in a thread.
    `health` of the result says what was found. Raises HotSick when the disk does not allow it.
    """
    opened = await open_in_any_state(directory, boot_id, exists, map_bytes)
    try:
        log = ObjectLog(directory / LOG_NAME)
    except HotSick:
        opened.environment.close()
        raise
    return LmdbIndex(directory, opened, log, touch_seconds)


class LmdbIndex:
    """The `Index` protocol; see `open_index`."""

    def __init__(self, directory: Path, opened: Opened, log: ObjectLog, touch_seconds: float) -> None:
        self.health = opened.health
        self._directory = directory
        self._environment = opened.environment
        self._reading = opened.environment.reading
        self._writer = Writer(opened.environment, log, opened.published, touch_seconds)
        self._closed = False

    # namespace

    def link(self, parent: Inode, name: bytes) -> Link | None:
        with self._reading as view:
            return view.get(ENTRIES, entry_key(parent, name))

    def entry(self, inode: Inode) -> Entry | None:
        with self._reading as view:
            return view.get(INODES, inode_key(inode))

    def directory(self, inode: Inode) -> DirectoryState | None:
        with self._reading as view:
            return view.get(DIRECTORIES, inode_key(inode))

    def names(self, parent: Inode, after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, Link]]:
        with self._reading as view:
            return [(key[INODE_BYTES:], link) for key, link in _names(view, parent, after, limit)]

    def listing(self, parent: Inode, after: bytes = b"", limit: int = 1000) -> list[Entry]:
        """What `names` lead to, in one transaction: for readdir, which needs the attributes too."""
        with self._reading as view:
            found = [(inode_key(link.inode), key) for key, link in _names(view, parent, after, limit)]
            entries = []
            for inode, key in found:
                entry = view.get(INODES, inode)
                if entry is None:
                    raise ENTRIES.damaged(key, "it leads to an inode that is not there")
                entries.append(entry)
            return entries

    # hot tier

    def hot(self, object_id: ObjectId) -> HotRecord | None:
        with self._reading as view:
            return view.get(HOT, object_id)

    def chunks(self, object_id: ObjectId) -> dict[int, ChunkRecord]:
        with self._reading as view:
            found = view.scan(CHUNKS, object_id, object_id)
            return {int.from_bytes(key[OBJECT_ID_BYTES:], "big"): record for key, record in found}

    def sample_hot(self, count: int, rng: random.Random) -> list[HotRecord]:
        with self._reading as view:
            if self.hot_count() <= count:
                return [record for _, record in view.scan(HOT, b"")]
            found: dict[bytes, HotRecord] = {}
            for _ in range(2 * count):
                drawn = next(view.scan(HOT, rng.randbytes(OBJECT_ID_BYTES)), None) or next(view.scan(HOT, b""), None)
                if drawn is not None:
                    found[drawn[0]] = drawn[1]
                if len(found) == count:
                    break
            return list(found.values())

    def all_hot(self) -> Iterator[HotRecord]:
        start = b""
        while True:
            with self._reading as view:
                batch = [record for _, record in islice(view.scan(HOT, start), ALL_HOT_BATCH)]
            if not batch:
                return
            yield from batch
            start = batch[-1].object_id + b"\x00"

    def held_bytes(self, directory: int) -> int:
        return self._writer.published.meta.held_bytes.get(directory, 0)

    def hot_count(self) -> int:
        return self._writer.published.meta.hot_count

    def size_bytes(self) -> int:
        return self._environment.used_bytes() + self._writer.log_bytes

    # pins

    def pins(self) -> list[Pin]:
        return sorted(self._writer.published.pins.values(), key=lambda pin: (pin.dataset, pin.prefix, pin.exact))

    # writing

    async def commit(self, changes: Sequence[Change], *, sync: bool = False) -> None:
        """Raises HotSick (the disk; nothing of it happened) or IndexDamaged. Cancelling the wait does not undo the changes."""
        await self._writer.commit(changes, sync=sync)

    def submit(self, changes: Sequence[Change]) -> None:
        self._writer.submit(changes)

    async def prune(self) -> int:
        """Raises HotSick, IndexDamaged."""
        forgotten = 0
        step: PruneStep | None = PruneStep(b"", PRUNE_BUDGET)
        while step is not None:
            pruned = await self._writer.commit([step], sync=False)
            assert pruned is not None
            forgotten += pruned.forgotten_count
            step = pruned.next
        return forgotten

    async def watch(self) -> None:
        """Wait for the end of the writer; raises IndexDamaged when damage ended it. For the daemon's nursery."""
        await self._writer.watch()

    async def aclose(self, *, clean: bool) -> None:
        """Idempotent. A damaged index gets no clean mark. Raises HotSick when the mark cannot be written."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            await self._writer.aclose()
            await trio.to_thread.run_sync(self._close_files, clean and not self._writer.failed)

    def _close_files(self, clean: bool) -> None:
        try:
            if clean:
                self._environment.sync()
            transaction = self._environment.last_transaction()
        finally:
            self._environment.close()
        if clean:
            try:
                write_mark(self._directory, self._directory / DATA_NAME, transaction)
            except OSError as error:
                hint = "check the cache disk; the next start verifies the index and the hot files"
                raise HotSick(f"clean mark in {self._directory}: {error.strerror}", hint=hint) from error


def _names(view: View, parent: Inode, after: bytes, limit: int) -> Iterator[tuple[bytes, Link]]:
    successor = after + b"\x00"
    return islice(view.scan(ENTRIES, entry_key(parent, successor), inode_key(parent)), limit)
