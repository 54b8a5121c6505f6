"""Nodes with a warm tier and without a kernel, on targets that several of them share."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.engine.engines import KIB, Mounted, engine_on, limits
from tiercache.config import WarmSettings
from tiercache.core.record import HotRecord
from tiercache.engine.demotion import Outcome
from tiercache.engine.progress import ScrubProgress
from tiercache.engine.warm_scrubbing import WarmScrub
from tiercache.engine.warmset import WarmSet
from tiercache.errors import Unavailable
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.faulty import Fault, Faulty
from tiercache.tiers.memory import MemoryCold

CHUNK_BYTES = 64 * KIB
PACKED_BYTES = 16 * KIB
CURSOR = "scrub.json"
ALL_IS_OLD_SECONDS = -1.0
"""As the grace of a scrub: also what came in this tick of the clock."""


class Unreadable:
    """A store that lists its objects and, while `is_down`, gives none of them."""

    def __init__(self, *, is_down: bool = False) -> None:
        self.is_down = is_down

    def draw(self, operation: str, key: str) -> Fault | None:
        if not self.is_down or operation != "read":
            return None
        return Fault(operation, error=lambda: Unavailable(f"{key} did not come"))


class Scrubbed:
    """Counts what a scrub tells."""

    def __init__(self) -> None:
        self.damages: Counter[str] = Counter()

    def scrubbed(self, read_bytes: int) -> None:
        pass

    def damaged(self, kind: str) -> None:
        self.damages[kind] += 1


class Node:
    """One engine, what keeps its targets whole, and its way to the store."""

    def __init__(self, mount: Mounted, home: Path, faults: Unreadable) -> None:
        assert mount.engine.warm is not None
        self.mount = mount
        self.warm: WarmSet = mount.engine.warm
        self.faults = faults
        self.cursor = home / CURSOR

    async def demote(self) -> dict[tuple[str, str], Outcome]:
        """Everything that is hot; what became of each, by key and version."""
        outcomes: dict[tuple[str, str], Outcome] = {}

        def settled(record: HotRecord, outcome: Outcome) -> None:
            outcomes[record.key, record.version] = outcome

        assert self.mount.engine.demotion is not None
        await self.mount.settled()
        await self.mount.engine.demotion.demote(list(self.mount.engine.index.all_hot()), settled)
        return outcomes

    async def write_again(self) -> None:
        """Another copy of everything that is hot, as a node makes it that has not seen the first one in time."""
        demotion = self.mount.engine.demotion
        assert demotion is not None
        records = list(self.mount.engine.index.all_hot())
        await demotion._write_members([record for record in records if record.size_bytes <= PACKED_BYTES])
        for record in records:
            if record.size_bytes > PACKED_BYTES:
                await demotion._write(record)

    async def forget_hot(self) -> None:
        """Evict everything, whether there is a warm copy or not."""
        await self.mount.settled()
        await self.mount.engine.holdings.evict([record.object_id for record in self.mount.engine.index.all_hot()])

    async def scrub(self, *, repair: bool, grace_seconds: float = 0.0) -> ScrubProgress:
        """A pass. One without grace takes for young only what came in this tick of the clock: nobody else may be writing."""
        progress = ScrubProgress()
        warm = self.warm
        parts = (warm.targets, warm.copies, warm.repairs, warm.repacking)
        scrub = WarmScrub(*parts, Scrubbed(), self.cursor, 0, grace_seconds=grace_seconds)
        await scrub.scrub(repair, progress)
        return progress

    async def probe(self) -> None:
        """Look at all targets now."""
        async with trio.open_nursery() as nursery:
            for target in self.warm.targets.all:
                nursery.start_soon(self.warm.targets.probe, target)


@asynccontextmanager
async def node_on(
    home: Path,
    targets: Sequence[Path],
    store: MemoryCold,
    geometry: str = "4+2",
    *,
    faults: Unreadable | None = None,
    index: MemoryIndex | None = None,
    capacity_bytes: int = 1 << 30,
) -> AsyncIterator[Node]:
    """A node whose own directories lie in `home`. Chunks and packs are small, so that small objects meet what large ones do."""
    await trio.Path(home).mkdir(exist_ok=True)
    faults = faults if faults is not None else Unreadable()
    data_count, parity_count = map(int, geometry.split("+"))
    settings = WarmSettings(
        targets=tuple(map(str, targets)),
        data_shards=data_count,
        parity_shards=parity_count,
        zstd_level=1,
        pack_threshold_bytes=PACKED_BYTES,
    )
    cold, numbers = Faulty(store, faults), limits(CHUNK_BYTES)
    async with engine_on(
        home, cold, index=index, capacity_bytes=capacity_bytes, warm=settings, numbers=numbers, ttl_seconds=0.0
    ) as mount:
        node = Node(mount, home, faults)
        await node.warm.catalogues.refresh()
        yield node
