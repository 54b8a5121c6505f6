"""Which pack holds an object: the catalogue of all packs' members, in memory.

Packs hold the small objects, so there may be tens of millions of members, and most questions are answered by no. An entry is 16
bytes: 65,536 buckets by the first two bytes of the object id, in each, side by side and in no order, (the next 8 bytes of the id,
pack number, member number). A bucket is searched with `bytearray.find`: at 10 million members it has 2.4 KB. A dict would take
ten times the memory. 80 of the 160 bits of an id are kept, so who reads compares the member's own id.

Pack numbers are not used again, and entries of packs that were dropped are passed over until a sweep comes by: every drop sweeps
a part of the buckets. One thread changes the catalogue; others may call `find` meanwhile, as every bucket is only ever appended
to or replaced whole.
"""

from __future__ import annotations

import struct

from tiercache.core.manifest import Manifest
from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation

_ENTRY = struct.Struct("<8sII")
_BUCKETS_COUNT = 1 << 16
_SWEPT_PER_DROP = 256  # so that what one drop leaves is gone after 256 others


class Catalogue:
    def __init__(self) -> None:
        self.members_count = 0
        self._buckets: list[bytearray | None] = [None] * _BUCKETS_COUNT
        self._packs: list[tuple[ObjectId, Generation] | None] = []  # by pack number; None: dropped
        self._known: dict[tuple[ObjectId, Generation], tuple[int, int]] = {}  # number, members
        self._stale_count = 0
        self._next_swept = 0

    def __contains__(self, pack: tuple[ObjectId, Generation]) -> bool:
        return pack in self._known

    @property
    def packs(self) -> list[tuple[ObjectId, Generation]]:
        return list(self._known)

    @property
    def packs_count(self) -> int:
        return len(self._known)

    @property
    def entries_bytes(self) -> int:
        """What the entries occupy, those of dropped packs included that no sweep has come to."""
        return (self.members_count + self._stale_count) * _ENTRY.size

    def add(self, manifest: Manifest) -> None:
        """The members of a pack. One that is known already is passed over."""
        assert manifest.is_pack
        pack = (manifest.object_id, manifest.generation)
        if pack in self._known:
            return
        number = len(self._packs)
        self._packs.append(pack)
        for member in range(manifest.stripes_count):
            object_id = manifest.member_id(member)
            position, entry = _bucket_of(object_id), _ENTRY.pack(object_id[2:10], number, member)
            bucket = self._buckets[position]
            if bucket is None:
                self._buckets[position] = bytearray(entry)
            else:
                bucket += entry
        self._known[pack] = (number, manifest.stripes_count)
        self.members_count += manifest.stripes_count

    def drop(self, pack_id: ObjectId, generation: Generation) -> None:
        """Forgets a pack; an unknown one is passed over."""
        number, members_count = self._known.pop((pack_id, generation), (None, 0))
        if number is None:
            return
        self._packs[number] = None
        self.members_count -= members_count
        self._stale_count += members_count
        for position in range(self._next_swept, self._next_swept + _SWEPT_PER_DROP):
            self._sweep(position)
        self._next_swept = (self._next_swept + _SWEPT_PER_DROP) % _BUCKETS_COUNT

    def find(self, object_id: ObjectId) -> list[tuple[ObjectId, Generation, int]]:
        """(pack, generation, member number) of each copy that may be the object's, smallest generation first."""
        bucket = self._buckets[_bucket_of(object_id)]
        found: list[tuple[ObjectId, Generation, int]] = []
        if bucket is None:
            return found
        wanted = object_id[2:10]
        position = bucket.find(wanted)
        while position >= 0:
            if position % _ENTRY.size == 0:
                _, number, member = _ENTRY.unpack_from(bucket, position)
                pack = self._packs[number]
                if pack is not None:
                    found.append((*pack, member))
            position = bucket.find(wanted, position + 1)
        return sorted(found, key=lambda each: (each[1], each[0], each[2]))

    def _sweep(self, position: int) -> None:
        bucket = self._buckets[position]
        if bucket is None or self._stale_count == 0:
            return
        kept = bytearray()
        for entry in _ENTRY.iter_unpack(bucket):
            if self._packs[entry[1]] is not None:
                kept += _ENTRY.pack(*entry)
        if len(kept) < len(bucket):
            self._stale_count -= (len(bucket) - len(kept)) // _ENTRY.size
            self._buckets[position] = kept or None


def _bucket_of(object_id: bytes) -> int:
    return object_id[0] << 8 | object_id[1]


assert _BUCKETS_COUNT % _SWEPT_PER_DROP == 0
