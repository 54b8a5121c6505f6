"""The warm tier of one mount, opened: targets, what is known of their copies, who reads, writes and mends them.

The parts get each other here and nowhere else; the engine gets the set. Everything that runs by itself is started by `run`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from tiercache.config import WarmSettings
from tiercache.core.stripe import Geometry
from tiercache.engine.warm_packing import Repacking
from tiercache.engine.warm_repair import Repairs
from tiercache.engine.warm_room import WarmRoom
from tiercache.engine.warm_scrubbing import WarmScrub
from tiercache.metrics.tally import Tally
from tiercache.tiers.measured import MeasuredTier
from tiercache.tiers.warm.catalogue import Catalogues
from tiercache.tiers.warm.copies import Copies
from tiercache.tiers.warm.hedging import Hedging
from tiercache.tiers.warm.loans import LOANS
from tiercache.tiers.warm.pieces import Pieces, Wish
from tiercache.tiers.warm.shards import Warm
from tiercache.tiers.warm.targets import Targets, open_targets
from tiercache.tiers.warm.writing import Staging, Writer, Written

MEMORY = "targets.json"
CURSOR = "scrub.json"
STAGING_BYTES = 128 << 20
REST_SECONDS = 1.0
SILENT_SECONDS = 2.0


class WarmSet:
    """`tier` reads, `writer` writes, and `wrote` is to be told what was written."""

    def __init__(
        self,
        nursery: trio.Nursery,
        settings: WarmSettings,
        targets: Targets,
        tally: Tally,
        cursor_path: Path,
        rng: random.Random,
    ) -> None:
        geometry = Geometry(settings.data_shards, settings.parity_shards)
        hedging = Hedging(nursery)
        self.targets = targets
        self.geometry = geometry
        self.pack_threshold_bytes = settings.pack_threshold_bytes
        self.catalogues = Catalogues(targets)
        self.copies = Copies(targets, self.catalogues, hedging, geometry.parity_count)
        self.room = WarmRoom(targets, self.copies, settings.capacity_bytes, geometry.shards_count)
        self.repairs = Repairs(targets, self.copies, tally.repaired)
        observer = _Observer(tally, self.repairs)
        pieces = Pieces(targets, hedging, observer)
        self.reads = Warm(self.copies, pieces, observer, pack_threshold_bytes=settings.pack_threshold_bytes)
        self.tier = MeasuredTier(self.reads, tally.requested)
        staging = Staging(STAGING_BYTES)
        self.writer = Writer(targets, geometry, zstd_level=settings.zstd_level, staging=staging, clock=time.time, rng=rng)
        self.repacking = Repacking(targets, self.reads, self.writer, self.wrote)
        self.scrubs = WarmScrub(
            targets, self.copies, self.repairs, self.repacking, observer, cursor_path, settings.scrub_rate_bytes
        )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.targets.run)
            nursery.start_soon(self.catalogues.run)
            nursery.start_soon(self.repairs.run)
            nursery.start_soon(self.room.run)
            while True:
                await trio.sleep(REST_SECONDS)
                LOANS.rest()

    def wrote(self, written: Written) -> None:
        """This node has written a copy; one that lacks shards is to be repaired."""
        manifest = written.manifest
        self.copies.add(manifest)
        self.room.wrote(manifest, written.stored_bytes)
        if written.missing_count:
            self.repairs.wish(Wish(manifest.object_id, manifest.generation, manifest.is_pack))

    async def held_up(self) -> str:
        """What keeps this process from ending, or from becoming another one, in one line: a thread that hangs in a target."""
        silent = await self.targets.silent(SILENT_SECONDS)
        return f"warm target {silent[0]} does not answer, and a process that waits for it cannot be replaced" if silent else ""

    async def aclose(self) -> None:
        await self.tier.aclose()
        await self.targets.aclose()


class _Observer:
    """What happens in warm reads and scrubs: counted, and what is damaged is repaired."""

    def __init__(self, tally: Tally, repairs: Repairs) -> None:
        self._tally = tally
        self._repairs = repairs

    def degraded(self) -> None:
        self._tally.warm_degraded()

    def hedged(self, count: int) -> None:
        self._tally.warm_hedged(count)

    def scrubbed(self, read_bytes: int) -> None:
        self._tally.warm_scrubbed(read_bytes)

    def damaged(self, kind: str) -> None:
        self._tally.warm_damaged(kind)

    def wished(self, wish: Wish) -> None:
        self._repairs.wish(wish)


async def open_warm(
    nursery: trio.Nursery,
    settings: WarmSettings,
    tally: Tally,
    memory_directory: Path,
    mountpoint: str,
    others: Sequence[tuple[str, str]],
) -> WarmSet | None:
    """None when no targets are configured. `others` are (what it is, path) of what must lie apart. Raises SetupError."""
    if not settings.targets:
        return None
    apart = [(what, Path(path)) for what, path in others]

    def observe(target: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None) -> None:
        tally.requested("target", operation, seconds, transferred_bytes, error)

    targets = await open_targets(settings.targets, memory_directory / MEMORY, Path(mountpoint), apart, observe=observe)
    return WarmSet(nursery, settings, targets, tally, memory_directory / CURSOR, random.Random())
