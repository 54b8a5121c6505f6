"""Room in the warm tier: how much of it tiercache uses, and which copies go when it is too much.

Targets are shared, so nobody knows what is there without looking: each node counts in the background, slowly, and adds what it
writes itself. The count is for the operator and for `[warm] capacity`; which copies are the oldest is looked up when some have to
go. All nodes find the same ones, so that several that make room at once remove little more than one would.

Over its capacity the tier shrinks to LOW_RATIO of it at once. When too few targets have as much free space as must be left for a
copy to be written, it gives way slowly, a fiftieth a minute: others may have filled the file system, and then all that would be
lost is ours.

A copy is taken back in the opposite order of its making: manifests first, so that nobody finds what is being removed.
"""

from __future__ import annotations

from itertools import islice

import structlog
import trio

from tiercache.core.chunk import held_bytes
from tiercache.core.eviction import WarmCopy, oldest_copies
from tiercache.core.manifest import Manifest
from tiercache.core.record import OBJECT_ID_BYTES, ObjectId
from tiercache.core.stripe import Generation, parse_manifest_name
from tiercache.errors import TierError
from tiercache.tiers.warm.catalogue import read_from_any
from tiercache.tiers.warm.copies import Copies
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets
from tiercache.tiers.warm.writing import remove_copy

log = structlog.get_logger()

LOOK_SECONDS = 5.0
COUNT_SECONDS = 6 * 3600.0
PAUSE_SECONDS = 0.005  # between two directories of a count, of which a target has thousands
LOW_RATIO = 0.95
GIVING_WAY_SHARE = 50
GIVING_WAY_SECONDS = 60.0
BATCH_COUNT = 256


class WarmRoom:
    """`capacity_bytes` is that of all targets together; None: only free space bounds it."""

    def __init__(self, targets: Targets, copies: Copies, capacity_bytes: int | None, shards_count: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._shards_count = shards_count
        self._targets = targets
        self._copies = copies
        self._counted: dict[bytes, int] = {}
        self._given_way_at = 0.0

    def used_bytes(self, target: Target) -> int | None:
        """What tiercache occupies there; None before it was counted."""
        return self._counted.get(target.uuid)

    @property
    def total_bytes(self) -> int:
        return sum(self._counted.values())

    def wrote(self, manifest: Manifest, stored_bytes: int) -> None:
        """This node has written a copy."""
        uuids = [uuid for uuid in manifest.placed if uuid in self._counted]
        for uuid in uuids:
            self._counted[uuid] += stored_bytes // len(uuids)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_counting)
            while True:
                await trio.sleep(LOOK_SECONDS)
                if need_bytes := self.excess_bytes():
                    await self.make_room(need_bytes)
                    await self._count_all()

    async def _keep_counting(self) -> None:
        while True:
            await self._count_all()
            await trio.sleep(COUNT_SECONDS)

    async def _count_all(self) -> None:
        for target in self._targets.all:
            await self.count(target)

    async def count(self, target: Target) -> None:
        """Add up what lies on a target. What cannot be looked at is left as it was counted before."""
        used_bytes = 0
        try:
            for kind in ("shards", "manifests"):
                for fan_out in await target.names(kind):
                    used_bytes += sum(found.occupied_bytes for found in await target.scan(f"{kind}/{fan_out}"))
                    await trio.sleep(PAUSE_SECONDS)
            used_bytes += sum(found.occupied_bytes for found in await target.scan("packs"))
        except TierError as error:
            log.info("warm_target_not_counted", target=target.path, error=error.line)
        else:
            self._counted[target.uuid] = used_bytes

    def excess_bytes(self) -> int:
        """What should go now. Where only free space bounds the tier, the answer is given once a minute."""
        if self.capacity_bytes is not None and self.total_bytes > self.capacity_bytes:
            return self.total_bytes - int(self.capacity_bytes * LOW_RATIO)
        now = trio.current_time()
        is_due = now >= self._given_way_at + GIVING_WAY_SECONDS
        if not is_due or not any(map(self._targets.lacks_room, self._targets.all)):
            return 0
        if len(self._targets.for_shards(bytes(OBJECT_ID_BYTES), self._shards_count)) == self._shards_count:
            return 0  # the others have room
        self._given_way_at = now
        return self.total_bytes // GIVING_WAY_SHARE

    async def make_room(self, need_bytes: int) -> int:
        """Drop the oldest copies of about so many bytes, as far as they are not the only ones; what became free."""
        freed_bytes = dropped_count = 0
        names = iter(sorted(await self._names(), key=lambda name: name[1]))
        while freed_bytes < need_bytes and (batch := list(islice(names, BATCH_COUNT))):
            asked = [
                await read_from_any(self._targets, object_id, generation, is_pack=is_pack)
                for object_id, generation, is_pack in batch
            ]
            manifests = [manifest for manifest in asked if manifest is not None]
            going = oldest_copies(map(_described, manifests), need_bytes - freed_bytes)
            wanted = {(copy.object_id, copy.generation): copy for copy in going}
            for manifest in manifests:
                copy = wanted.get((manifest.object_id, manifest.generation))
                if copy is not None:
                    await remove_copy(self._targets, manifest)
                    self._forget(manifest)
                    freed_bytes += copy.occupied_bytes
                    dropped_count += 1
        log.info("warm_copies_dropped", copies=dropped_count, freed_bytes=freed_bytes, wanted_bytes=need_bytes)
        return freed_bytes

    def _forget(self, manifest: Manifest) -> None:
        if manifest.is_pack:
            self._copies.catalogues.drop(manifest.object_id, manifest.generation)
        self._copies.forget(manifest.object_id)
        for uuid in manifest.placed:
            if uuid in self._counted:
                self._counted[uuid] = max(0, self._counted[uuid] - held_bytes(manifest.shard_bytes()))

    async def _names(self) -> set[tuple[ObjectId, Generation, bool]]:
        """(object, generation, is it a pack) of every manifest on any target."""
        found: set[tuple[ObjectId, Generation, bool]] = set()
        for target in self._targets.all:
            try:
                directories = ["packs", *(f"manifests/{fan_out}" for fan_out in await target.names("manifests"))]
                for directory in directories:
                    parsed = map(parse_manifest_name, await target.names(directory))
                    found |= {(*name, directory == "packs") for name in parsed if name is not None}
            except TierError as error:
                log.info("warm_target_passed_over", target=target.path, error=error.line)
        return found


def _described(manifest: Manifest) -> WarmCopy:
    shards_count = len(manifest.placed) - manifest.placed.count(None)
    occupied_bytes = shards_count * held_bytes(manifest.shard_bytes())
    return WarmCopy(manifest.object_id, manifest.generation, manifest.is_pack, occupied_bytes, manifest.is_sole)
