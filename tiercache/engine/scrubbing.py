"""Scrub of the hot tier: hash what lies on the disk, at a bounded rate, and fetch again what is not what was written.

The kernel reads hot files without us, so nobody else would notice that a disk gives other bytes back than it was given.

Objects are drawn at random. That needs no position to remember and no pass to resume: after a time in which so many bytes were
hashed as the tier holds, a share of 1/e was not looked at, after twice that time 1/e^2. Only whole objects are looked at; others
are being filled, or are read through the daemon. Hashing goes past the page cache (`hash_on_disk`), which would show the bytes as
they were written, and would lose what readers have in it.

`pass_over` looks at each object once, as fast as one chunk after the other can be read: an operator waits for it. What
it finds is mended as well, since readers of the kernel's own path would get the damage otherwise.

A damaged chunk is hashed once more while nobody can evict it, then dropped and fetched into its place in the same file: programs
that have the file open see the right bytes from then on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Protocol

import structlog
import trio

from tiercache.core.chunk import chunk_span
from tiercache.core.record import ChunkRecord, HotRecord, ObjectRef
from tiercache.engine.holdings import Holdings
from tiercache.engine.progress import ScrubProgress
from tiercache.errors import HotSick, TiercacheError
from tiercache.index.index import Index
from tiercache.tiers.hot import HotTier

log = structlog.get_logger()

SAMPLE_COUNT = 16
IDLE_SECONDS = 10.0
PASS_COUNT = 1000  # records that are taken from the index at a time
LEAST_BYTES = 1 << 20
"""What an object counts for besides its bytes: looking at a small file costs 0.5 ms of CPU, which those do not show."""


class Observer(Protocol):
    def scrubbed(self, count: int) -> None: ...

    def verify_failed(self, ref: ObjectRef) -> None: ...


class Scrub:
    """`rate_bytes` a second at most, of all hot directories together; 0: none. `wish` fetches what an object lacks."""

    def __init__(
        self,
        index: Index,
        files: HotTier,
        holdings: Holdings,
        observer: Observer,
        rate_bytes: int,
        rng: random.Random,
        wish: Callable[[ObjectRef], None],
    ) -> None:
        self._index = index
        self._files = files
        self._holdings = holdings
        self._rate_bytes = rate_bytes
        self._rng = rng
        self._observer = observer
        self._wish = wish

    async def run(self) -> None:
        while self._rate_bytes:
            records = self._index.sample_hot(SAMPLE_COUNT, self._rng)
            if not any(record.complete for record in records):
                await trio.sleep(IDLE_SECONDS)
            for record in records:
                await trio.sleep(LEAST_BYTES / self._rate_bytes)
                try:
                    await self.look_at(record)
                except TiercacheError as error:
                    log.info("not_scrubbed", key=record.key, error=error.line)

    async def pass_over(self, progress: ScrubProgress, path_of: Callable[[str, str], str]) -> None:
        """Hash every whole object once, without a limit to the rate; `path_of(dataset, key)` names one for the operator."""
        progress.total_count = self._index.hot_count()
        records = self._index.all_hot()
        while batch := await trio.to_thread.run_sync(lambda: list(islice(records, PASS_COUNT))):
            for record in batch:
                await self._pass(record, progress, path_of(record.dataset, record.key))

    async def _pass(self, record: HotRecord, progress: ScrubProgress, path: str) -> None:
        try:
            if not record.complete:
                progress.found["incomplete"] += 1
            elif self._holdings.disks.is_sick(record.directory):
                raise HotSick(f"hot directory {record.directory} failed a moment ago", hint="look at `tiercache status`")
            elif not await self._look_at(record, seconds_per_byte=0.0):
                progress.damaged_count += 1
                progress.repaired_count += 1
                progress.say(f"{path}: damaged on the disk, dropped and fetched again")
        except TiercacheError as error:
            progress.failures.add(path, error)
        progress.done_count += 1
        progress.done_bytes += record.held_bytes

    async def look_at(self, record: HotRecord) -> bool:
        """Hash all chunks of one object; whether they are right. Raises HotTierError."""
        return await self._look_at(record, seconds_per_byte=1 / self._rate_bytes)

    async def _look_at(self, record: HotRecord, *, seconds_per_byte: float) -> bool:
        is_right = True
        if not record.complete or self._holdings.disks.is_sick(record.directory):
            return is_right
        for chunk, known in self._index.chunks(record.object_id).items():
            size = chunk_span(record.size_bytes, record.chunk_bytes, chunk)[1]
            due = trio.current_time() + size * seconds_per_byte
            if not await self._matches(record, chunk, known):
                is_right = not await self._mend(record, chunk, known) and is_right
            await trio.sleep_until(due)
        return is_right

    async def _matches(self, record: HotRecord, chunk: int, known: ChunkRecord) -> bool:
        begin, size = chunk_span(record.size_bytes, record.chunk_bytes, chunk)
        digest = await self._holdings.disks.run(
            record.directory, self._files.hash_on_disk, record.object_id, record.size_bytes, record.directory, begin, size
        )
        self._observer.scrubbed(size)
        return digest == known.digest

    async def _mend(self, record: HotRecord, chunk: int, known: ChunkRecord) -> bool:
        """Whether it was damaged indeed: it may have been evicted, or fetched again, while it was hashed."""
        ref = ObjectRef(record.dataset, record.key, record.version, record.size_bytes, 0, record.object_id)
        held = await self._holdings.acquire(ref)
        try:
            still = self._index.chunks(record.object_id).get(chunk)
            if not held.has(chunk) or still is None or still.digest != known.digest or await self._matches(record, chunk, known):
                return False
            log.error("hot_chunk_damaged", key=record.key, chunk=chunk, directory=record.directory)
            self._holdings.drop_chunk(held, chunk)
            self._observer.verify_failed(ref)
        finally:
            self._holdings.release(held)
        self._wish(ref)
        return True
