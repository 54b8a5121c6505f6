"""The last few stripes that were read in part, in memory: a fill comes as two ranges of one chunk, random reads many to one.

A stripe is kept in parts of equal size: one part where it had to be joined or decompressed, one a piece where it is plain,
because of a plain stripe only those pieces are read that a read touches.
"""

from __future__ import annotations

from collections import OrderedDict

from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation

Key = tuple[ObjectId, Generation, int]


class Parts:
    """Verified bytes of one stripe. Part i has the bytes from i * part_bytes on."""

    __slots__ = ("held_bytes", "part_bytes", "parts")

    def __init__(self, part_bytes: int) -> None:
        assert part_bytes > 0
        self.part_bytes = part_bytes
        self.parts: dict[int, memoryview] = {}
        self.held_bytes = 0

    def add(self, number: int, part: memoryview) -> None:
        if number not in self.parts:
            self.parts[number] = part
            self.held_bytes += len(part)

    def touched(self, offset: int, length: int) -> range:
        """The parts that have these bytes of the stripe."""
        return range(offset // self.part_bytes, (offset + length - 1) // self.part_bytes + 1)

    def cut(self, offset: int, length: int) -> list[memoryview] | None:
        """These bytes, or None when one of the parts is not there."""
        views = []
        for number in self.touched(offset, length):
            if (part := self.parts.get(number)) is None:
                return None
            begin = number * self.part_bytes
            views.append(part[max(0, offset - begin) : offset + length - begin])
        return views


class Kept:
    """Least recently used go first. Used on the event loop only."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._stripes: OrderedDict[Key, Parts] = OrderedDict()
        self._held_bytes = 0

    def get(self, key: Key) -> Parts | None:
        if (parts := self._stripes.get(key)) is not None:
            self._stripes.move_to_end(key)
        return parts

    def put(self, key: Key, parts: Parts) -> None:
        """Keep these, besides what of the stripe is kept already."""
        before = self._stripes.pop(key, None)
        if before is not None:
            self._held_bytes -= before.held_bytes
            if before.part_bytes == parts.part_bytes:
                for number, part in before.parts.items():
                    parts.add(number, part)
        self._stripes[key] = parts
        self._held_bytes += parts.held_bytes
        while self._held_bytes > self._limit_bytes:
            _, oldest = self._stripes.popitem(last=False)
            self._held_bytes -= oldest.held_bytes

    def clear(self) -> None:
        self._stripes.clear()
        self._held_bytes = 0
