"""What the index knows of one file's copies: for extended attributes, `where` and pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from tiercache.core.chunk import chunk_count, held_bytes
from tiercache.core.record import Entry, HotRecord, ObjectId
from tiercache.index.index import Index


@dataclass(frozen=True)
class Hot:
    """What of an object is on the local disk. `held_bytes` are whole blocks of committed chunks."""

    held_bytes: int
    chunks_present: int
    chunks_total: int

    @property
    def complete(self) -> bool:
        return self.chunks_present == self.chunks_total


class Facts:
    """`is_warm`: has this node seen a warm copy?"""

    def __init__(self, index: Index, chunk_bytes: int, is_warm: Callable[[ObjectId], bool]) -> None:
        self._index = index
        self._chunk_bytes = chunk_bytes
        self._is_warm = is_warm

    def hot(self, entry: Entry) -> Hot:
        record = self._index.hot(entry.object_id)
        if record is None:
            return Hot(0, 0, chunk_count(entry.size_bytes, self._chunk_bytes))
        total = chunk_count(record.size_bytes, record.chunk_bytes)
        present = total if _is_whole(record) else len(self._index.chunks(entry.object_id))
        return Hot(record.held_bytes, present, total)

    def hot_bytes(self, entry: Entry) -> int:
        """How many of the file's own bytes are hot."""
        hot = self.hot(entry)
        return entry.size_bytes if hot.complete else min(entry.size_bytes, hot.held_bytes)

    def residency(self, entry: Entry) -> str:
        """The tiers with a whole copy, a replica aside, and 'hot(3/64)' for three chunks of 64."""
        hot = self.hot(entry)
        below = "warm,cold" if self._is_warm(entry.object_id) else "cold"
        if hot.complete and hot.chunks_total:
            return f"hot,{below}"
        return f"hot({hot.chunks_present}/{hot.chunks_total}),{below}" if hot.chunks_present else below

    def checksum(self, entry: Entry) -> str:
        """Of a complete hot copy, '' when there is none: 'xxh3:' and the xxh3-64 of its bytes.

        Of one with several chunks 'xxh3-chunks:', the chunk size, and the xxh3-64 of their digests (8 bytes each, big-endian,
        in order).
        """
        record = self._index.hot(entry.object_id)
        if record is None or not _is_whole(record):
            return ""
        chunks = self._index.chunks(entry.object_id)
        digests = [chunks[chunk].digest for chunk in sorted(chunks)]
        if len(digests) == 1:
            return f"xxh3:{digests[0]:016x}"
        joined = b"".join(digest.to_bytes(8, "big") for digest in digests)
        return f"xxh3-chunks:{record.chunk_bytes}:{xxhash.xxh3_64_hexdigest(joined)}"


def _is_whole(record: HotRecord) -> bool:
    """Complete, and no chunk of it was lost on its way into the index."""
    return record.complete and record.held_bytes == held_bytes(record.size_bytes)
