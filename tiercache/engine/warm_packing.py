"""Members that lie in two packs, as two nodes leave them that demoted the same small objects at the same time.

The member of the oldest pack that can be read counts. A younger pack that has others besides is written anew without those, and
removed when the new one is committed. The new pack takes the place of the old one in the order of packs: its generation is the
one just before. So nothing becomes younger by it, a member is only ever given up for one in an older pack, whatever several nodes
do at once, and a node that dies between the two steps leaves a pack of which all members are in older ones.

What cannot be read, or would be less redundant than it may be, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial

import trio

from tiercache.core.manifest import Manifest, Member
from tiercache.core.record import ObjectId, ObjectRef
from tiercache.core.stripe import Generation
from tiercache.engine.warm_examining import AfterRead, examine, locate
from tiercache.errors import Damaged, Unavailable
from tiercache.tiers.tier import MemorySink
from tiercache.tiers.warm.catalogue import read_from_any
from tiercache.tiers.warm.copies import Copies
from tiercache.tiers.warm.shards import Warm
from tiercache.tiers.warm.targets import Targets
from tiercache.tiers.warm.writing import Batch, Writer, Written, remove_copy

BATCH_BYTES = 4 << 20
"""Of members that are read and encoded together."""

Pack = tuple[ObjectId, Generation]


class Overlaps:
    """What packs have in common, for one pass of a scrub: whether a pack can be read is found out once."""

    def __init__(self, targets: Targets, copies: Copies, pace: AfterRead) -> None:
        self._targets = targets
        self._copies = copies
        self._pace = pace
        self._readable: dict[Pack, bool] = {}

    async def in_older(self, manifest: Manifest) -> frozenset[int]:
        """The numbers of a pack's members that are in older packs, too, which exist now and can be read."""
        assert manifest.is_pack
        own = (manifest.generation, manifest.object_id)
        others: dict[Pack, Manifest | None] = {}
        found = set()
        for number in range(manifest.stripes_count):
            object_id = manifest.member_id(number)
            for pack_id, generation, other_number in self._copies.catalogues.find(object_id):
                if (generation, pack_id) >= own:
                    continue
                pack = (pack_id, generation)
                if pack not in others:
                    others[pack] = await self._usable(pack)
                other = others[pack]
                if other is not None and other.member_id(other_number) == object_id:
                    found.add(number)
                    break
        return frozenset(found)

    async def _usable(self, pack: Pack) -> Manifest | None:
        """Its manifest as a target gives it now, if the pack can be read."""
        manifest = await read_from_any(self._targets, *pack, is_pack=True)
        return manifest if manifest is not None and await self._can_be_read(manifest) else None

    async def _can_be_read(self, manifest: Manifest) -> bool:
        """From the targets that answer."""
        pack = (manifest.object_id, manifest.generation)
        if pack not in self._readable:
            self._readable[pack] = False
            with suppress(Damaged):
                condition = await examine(manifest, *await locate(self._targets, *pack), self._pace)
                numbers, data_count = range(manifest.stripes_count), manifest.geometry.data_count
                self._readable[pack] = all(condition.count(number) >= data_count for number in numbers)
        return self._readable[pack]


class Repacking:
    """Writes packs anew. `wrote` is told of each."""

    def __init__(self, targets: Targets, reads: Warm, writer: Writer, wrote: Callable[[Written], None]) -> None:
        self._targets = targets
        self._reads = reads
        self._writer = writer
        self._wrote = wrote

    async def write_without(self, manifest: Manifest, superfluous: Set[int], pace: AfterRead) -> None:
        """Commit a pack of all members but these. Raises a TierError when it cannot be; then there is none.

        The caller removes the old one.
        """
        shards_count = self._writer.geometry.shards_count
        fit_count = len(self._targets.for_shards(manifest.object_id, shards_count))
        if fit_count < shards_count:
            raise Unavailable(f"only {fit_count} warm targets take shards, and there are {shards_count}")
        kept = [number for number in range(manifest.stripes_count) if number not in superfluous]
        batches = [self._batch(manifest, numbers, pace) for numbers in _groups(manifest, kept)]
        generation = Generation(max(0, manifest.generation - 1))
        written = await self._writer.write_pack(batches, trio.lowlevel.checkpoint, generation=generation)
        if written.missing_count or written.manifest.stripes_count < len(kept):
            await remove_copy(self._targets, written.manifest)
            raise Unavailable("not all shards, or not all members, of a pack could be written anew")
        self._wrote(written)

    def _batch(self, manifest: Manifest, numbers: Sequence[int], pace: AfterRead) -> Batch:
        members = [manifest.members[number] for number in numbers]
        digests = [manifest.stripe(number).digest for number in numbers]
        return Batch(sum(member.size_bytes for member in members), partial(self._load, members, pace), digests, members)

    async def _load(self, members: Sequence[Member], pace: AfterRead) -> list[memoryview]:
        loaded = []
        for member in members:
            sink = MemorySink(member.size_bytes)
            if member.size_bytes:
                ref = ObjectRef("", member.key, member.version, member.size_bytes, member.mtime_seconds, member.object_id)
                await self._reads.read(ref, 0, member.size_bytes, sink)
            await pace(member.size_bytes)
            loaded.append(sink.view)
        return loaded


def _groups(manifest: Manifest, numbers: Sequence[int]) -> Iterator[list[int]]:
    """In order, each of about BATCH_BYTES."""
    group: list[int] = []
    group_bytes = 0
    for number in numbers:
        group.append(number)
        group_bytes += manifest.stripe(number).logical_bytes
        if group_bytes >= BATCH_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group
