"""What an operator may ask of the warm tier, put together; and finding all copies on the targets again."""

from __future__ import annotations

import trio

from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation, parse_manifest_name
from tiercache.engine.demotion import Demotion
from tiercache.engine.progress import RebuildProgress
from tiercache.engine.warm_controls import WarmControls, facts_of
from tiercache.engine.warmset import WarmSet
from tiercache.errors import TierError
from tiercache.tiers.warm.catalogue import read_manifest
from tiercache.tiers.warm.target import Target

READS_AT_ONCE = 8


def controls_of(warm: WarmSet, demotion: Demotion) -> WarmControls:
    return WarmControls(
        facts=lambda: facts_of(warm),
        holds=warm.reads.holds,
        demote=demotion.demote,
        scrub=warm.scrubs.scrub,
        rebuild=Rebuilding(warm).run,
    )


class Rebuilding:
    def __init__(self, warm: WarmSet) -> None:
        self._warm = warm

    async def run(self, progress: RebuildProgress) -> None:
        """Forget what is known of warm copies, and find all of them on the targets."""
        seen: set[tuple[ObjectId, Generation]] = set()
        self._warm.copies.forget_all()
        await self._warm.catalogues.refresh()
        progress.total_count = len(self._warm.targets.all)
        for target in self._warm.targets.all:
            try:
                await self._walk(target, seen, progress)
            except TierError as error:
                progress.failures.add(target.path, error)
            else:
                progress.done_count += 1

    async def _walk(self, target: Target, seen: set[tuple[ObjectId, Generation]], progress: RebuildProgress) -> None:
        for directory in ["packs", *(f"manifests/{fan_out}" for fan_out in await target.names("manifests"))]:
            found = {parsed for name in await target.names(directory) if (parsed := parse_manifest_name(name)) is not None}
            new = sorted(found - seen)
            limiter = trio.CapacityLimiter(READS_AT_ONCE)
            async with trio.open_nursery() as nursery:
                for copy in new:
                    await limiter.acquire_on_behalf_of(copy)
                    nursery.start_soon(self._count, target, copy, directory == "packs", seen, progress, limiter)

    async def _count(
        self,
        target: Target,
        copy: tuple[ObjectId, Generation],
        is_pack: bool,
        seen: set[tuple[ObjectId, Generation]],
        progress: RebuildProgress,
        limiter: trio.CapacityLimiter,
    ) -> None:
        """A manifest that cannot be read here may be read from another target."""
        try:
            manifest = await read_manifest(target, *copy, is_pack=is_pack)
        except TierError as error:
            progress.failures.add(f"{target.path}: manifest of {copy[0].hex()}", error)
            return
        finally:
            limiter.release_on_behalf_of(copy)
        seen.add(copy)
        progress.logical_bytes += manifest.size_bytes
        if is_pack:
            progress.packs_count += 1
            progress.members_count += manifest.stripes_count
        else:
            progress.copies_count += 1
