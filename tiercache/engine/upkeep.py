"""What the daemon does for itself, every second and every half minute: measure free space, reclaim, sync, sweep, and see how late
its own loop runs.

Reclaim starts above the high watermark and stops at the low one, so that a reader rarely has to evict before it can fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import trio

from tiercache.engine.holdings import Holdings
from tiercache.errors import HotTierError
from tiercache.index.index import Index
from tiercache.tiers.hot import HotTier

log = structlog.get_logger()

TICK_SECONDS = 1.0
SYNC_SECONDS = 30.0
PROBE_SECONDS = 0.1
FAN_OUT_BYTES = 256 * 4096
"""The directories below `objects/`, each a block at least."""


class Upkeep:
    def __init__(
        self,
        index: Index,
        files: HotTier,
        holdings: Holdings,
        *,
        late: Callable[[float], None],
        harvest: Callable[[], None],
        sweep: bool,
    ) -> None:
        self._index = index
        self._files = files
        self._holdings = holdings
        self._late = late
        self._harvest = harvest
        self._sweeps = sweep

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._probe)
            nursery.start_soon(self._harvests)
            for directory in range(len(self._files.directories)):
                nursery.start_soon(self._keep, directory)
                nursery.start_soon(self._sync, directory)
                if self._sweeps:
                    nursery.start_soon(self._sweep, directory)

    async def _keep(self, directory: int) -> None:
        while True:
            try:
                await self.observe(directory)
                await self._holdings.remove_leftovers(directory)
                await self._reclaim(directory)
            except HotTierError as error:
                log.warning("hot_directory_not_measured", directory=directory, error=error.line)
            await trio.sleep(TICK_SECONDS)

    async def observe(self, directory: int) -> None:
        """Bring the directory's ledger up to date. Raises HotTierError."""
        ledger = self._holdings.room.ledgers[directory]
        filesystem = await self._holdings.disks.run(directory, self._files.filesystem, directory)
        ledger.observe_filesystem(filesystem.free_bytes, filesystem.total_bytes)
        ledger.overhead_bytes = FAN_OUT_BYTES + (self._index.size_bytes() if directory == 0 else 0)

    async def _reclaim(self, directory: int) -> None:
        ledger = self._holdings.room.ledgers[directory]
        if ledger.over_high:
            while excess_bytes := ledger.to_low_bytes():
                if not await self._holdings.reclaim(directory, excess_bytes):
                    return

    async def _sync(self, directory: int) -> None:
        while True:
            await trio.sleep(SYNC_SECONDS)
            try:
                await self._holdings.sync(directory)
            except HotTierError as error:
                log.warning("hot_directory_not_synced", directory=directory, error=error.line)

    async def _sweep(self, directory: int) -> None:
        try:
            removed_count = await self._holdings.sweep(directory)
        except HotTierError as error:
            log.warning("hot_directory_not_swept", directory=directory, error=error.line)
        else:
            log.info("hot_directory_swept", directory=directory, removed=removed_count)

    async def _harvests(self) -> None:
        while True:
            await trio.sleep(TICK_SECONDS)
            self._harvest()

    async def _probe(self) -> None:
        while True:
            due = time.perf_counter() + PROBE_SECONDS
            await trio.sleep(PROBE_SECONDS)
            self._late(max(0.0, time.perf_counter() - due))
