"""One object in memory: what is known of its hot copy while somebody uses it. `Holdings` makes, changes and forgets these."""

from __future__ import annotations

import trio

from tiercache.core.chunk import chunk_count, chunk_span, held_bytes
from tiercache.core.record import HotRecord, ObjectRef
from tiercache.index.index import Index
from tiercache.tiers.hot import HotFile


class Held:
    """One object in memory. `file` is None while nothing of it is on disk (or that could not be found out: not `is_loaded`).

    `past` says that the last fill had to stream past the hot tier. `brought` remembers which tier below a chunk came from
    while the object was in use: whoever reads it now causes that, so these reads count as that tier's and not as hits.
    `changes_count` is how many changes of it were given to the index.
    """

    def __init__(self, ref: ObjectRef, chunk_bytes: int) -> None:
        self.ref = ref
        self.chunk_bytes = chunk_bytes
        self.chunk_count = chunk_count(ref.size_bytes, chunk_bytes)
        self.file: HotFile | None = None
        self.present: set[int] = set()
        self.unverified: dict[int, int] = {}
        self.complete = ref.size_bytes == 0
        self.past = False
        self.brought: dict[int, str] = {}
        self.users = 0
        self.filling_count = 0
        self.is_loaded = False
        self.opening = trio.Lock()
        self.changes_count = 0

    def span(self, chunk: int) -> tuple[int, int]:
        return chunk_span(self.ref.size_bytes, self.chunk_bytes, chunk)

    def has(self, chunk: int) -> bool:
        """Is the chunk on disk (verified or not)?"""
        return self.file is not None and (self.complete or chunk in self.present)

    def origin(self, chunk: int) -> str:
        """The tier that a read of a present chunk is counted for."""
        return self.brought.get(chunk, "hot")

    @property
    def present_count(self) -> int:
        return self.chunk_count if self.complete else len(self.present)

    @property
    def present_bytes(self) -> int:
        """What the present chunks occupy."""
        whole_bytes, last = held_bytes(self.chunk_bytes), self.chunk_count - 1
        short_bytes = whole_bytes - held_bytes(self.span(last)[1]) if last in self.present else 0
        return len(self.present) * whole_bytes - short_bytes

    def begun(self, now_seconds: int) -> HotRecord:
        """The record of a file that was just created, with nothing in it."""
        assert self.file is not None
        return HotRecord(
            object_id=self.ref.object_id,
            dataset=self.ref.dataset,
            key=self.ref.key,
            version=self.ref.version,
            size_bytes=self.ref.size_bytes,
            chunk_bytes=self.chunk_bytes,
            directory=self.file.directory,
            held_bytes=0,
            complete=False,
            accessed_seconds=now_seconds,
            access_count=1,
        )


def counted_bytes(record: HotRecord, index: Index) -> int:
    """What the ledger counts for the chunks of a record. Its own sum is wrong where a change was lost and made again."""
    if record.complete and record.held_bytes == held_bytes(record.size_bytes):
        return record.held_bytes
    spans = (chunk_span(record.size_bytes, record.chunk_bytes, chunk) for chunk in index.chunks(record.object_id))
    return sum(held_bytes(length) for _, length in spans)
