"""Blocks that lie in hot files without belonging to a chunk that the index counts.

A fill that broke off leaves what it wrote, a chunk that turned out wrong leaves its blocks: hot files are never punched. The
ledger goes on counting them (that is what keeps `du` below the limit), so they have to be known by object, to be reused by
the chunk's next fill and released when the file goes. A walk (`sweep`) finds what an earlier process left; of that nobody
knows the chunk: it lies SOMEWHERE.

Only this process knows the residue: the index has to be closed without its clean mark as long as there is any.
"""

from __future__ import annotations

from tiercache.core.record import ObjectId

SOMEWHERE = -1


class Residue:
    def __init__(self) -> None:
        self._bytes: dict[ObjectId, dict[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def of(self, object_id: ObjectId, chunk: int) -> int:
        """Bytes, in whole blocks; 0 when there are none. `chunk` may be SOMEWHERE."""
        return self._bytes.get(object_id, {}).get(chunk, 0)

    def total(self, object_id: ObjectId) -> int:
        return sum(self._bytes.get(object_id, {}).values())

    def add(self, object_id: ObjectId, chunk: int, residue_bytes: int) -> None:
        if residue_bytes:
            chunks = self._bytes.setdefault(object_id, {})
            chunks[chunk] = chunks.get(chunk, 0) + residue_bytes

    def take(self, object_id: ObjectId, chunk: int) -> int:
        """The chunk's residue, which is none any more."""
        chunks = self._bytes.get(object_id)
        if chunks is None:
            return 0
        residue_bytes = chunks.pop(chunk, 0)
        if not chunks:
            del self._bytes[object_id]
        return residue_bytes

    def take_all(self, object_id: ObjectId) -> int:
        """All of the object's residue: its file is gone."""
        return sum(self._bytes.pop(object_id, {}).values())
