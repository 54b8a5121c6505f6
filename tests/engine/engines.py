"""A real engine on a cold store in memory: what the tests of the engine and the reference model drive.

Everything below the engine is real (hot files, ledger, index) but the store, whose gates decide what happens in between, and the
clock, which stands still until it is moved. Nothing runs by itself unless a test calls `engine.start()`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tiercache.config import WarmSettings
from tiercache.core.record import (
    ChunkRecord,
    DirectoryState,
    Entry,
    HotRecord,
    Inode,
    Link,
    ObjectId,
    Pin,
)
from tiercache.engine.dataset import Dataset
from tiercache.engine.engine import Engine, Limits
from tiercache.engine.publication import Publication
from tiercache.engine.warmset import open_warm
from tiercache.errors import HotSick
from tiercache.index.index import Change, Index
from tiercache.index.memory import MemoryIndex
from tiercache.metrics.definitions import Metrics
from tiercache.metrics.tally import Tally
from tiercache.tiers.hot import HotDirectory, HotTier
from tiercache.tiers.space import Ledger
from tiercache.tiers.tier import Cold, Tier

KIB = 1 << 10
MIB = 1 << 20
CHUNK_BYTES = 256 * KIB
DATASET = "data"
START_SECONDS = 1_000_000.0


def content(seed: int, size_bytes: int) -> bytes:
    """Bytes in which no two pages are equal: a page in the wrong place, or one of zeros, shows."""
    return random.Random(seed).randbytes(size_bytes)


class Clock:
    """Unix seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = START_SECONDS

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


class Lagging:
    """An index whose writer is as far behind as a test wants: what is submitted waits until `catch_up` or the next commit.

    `failing` makes the writer refuse what it is given, as on a full disk: waiters get the error, the rest is lost. After
    `lose` nothing reaches the index any more, as if the process had been killed at that moment.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.health = index.health
        self.lagging = False
        self.failing: Callable[[], Exception] | None = None
        self._waiting: list[Change] = []
        self._lost = False

    def catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self.failing is None and not self._lost:
            self.index.submit(waiting)

    def lose(self) -> None:
        self._lost = True

    def submit(self, changes: Sequence[Change]) -> None:
        self._waiting.extend(changes)
        if not self.lagging:
            self.catch_up()

    async def commit(self, changes: Sequence[Change], *, sync: bool = False) -> None:
        self.catch_up()
        if (failing := self.failing) is not None:
            await self.index.commit([])  # what was handed over while the disk was well is decided first, as by a real writer
            raise failing()
        if self._lost:
            await trio.lowlevel.checkpoint()
            raise HotSick("the process was killed")
        await self.index.commit(changes, sync=sync)

    def link(self, parent: Inode, name: bytes) -> Link | None:
        return self.index.link(parent, name)

    def entry(self, inode: Inode) -> Entry | None:
        return self.index.entry(inode)

    def directory(self, inode: Inode) -> DirectoryState | None:
        return self.index.directory(inode)

    def names(self, parent: Inode, after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, Link]]:
        return self.index.names(parent, after, limit)

    def hot(self, object_id: ObjectId) -> HotRecord | None:
        return self.index.hot(object_id)

    def chunks(self, object_id: ObjectId) -> dict[int, ChunkRecord]:
        return self.index.chunks(object_id)

    def sample_hot(self, count: int, rng: random.Random) -> list[HotRecord]:
        return self.index.sample_hot(count, rng)

    def all_hot(self) -> Iterator[HotRecord]:
        return self.index.all_hot()

    def held_bytes(self, directory: int) -> int:
        return self.index.held_bytes(directory)

    def hot_count(self) -> int:
        return self.index.hot_count()

    def size_bytes(self) -> int:
        return self.index.size_bytes()

    def pins(self) -> list[Pin]:
        return self.index.pins()

    async def prune(self) -> int:
        return await self.index.prune()

    async def aclose(self, *, clean: bool) -> None:
        await self.index.aclose(clean=clean)


class Mounted:
    """An engine as a mount uses it: paths are opened through the namespace, handles are inodes."""

    def __init__(self, engine: Engine, tally: Tally, clock: Clock, files: HotTier) -> None:
        self.engine = engine
        self.tally = tally
        self.clock = clock
        self.files = files

    @property
    def ledger(self) -> Ledger:
        return self.engine.room.ledgers[0]

    async def entry(self, path: str) -> Entry:
        return await self.engine.namespace.resolve(DATASET, path)

    async def open(self, path: str) -> Inode:
        entry = await self.entry(path)
        await self.engine.reader.open(entry.inode)
        return entry.inode

    async def read(self, inode: Inode, offset: int, length: int) -> bytes:
        return await self.engine.reader.read(inode, offset, length)

    def release(self, inode: Inode) -> None:
        self.engine.reader.release(inode)

    @asynccontextmanager
    async def opened(self, path: str) -> AsyncIterator[Inode]:
        inode = await self.open(path)
        try:
            yield inode
        finally:
            self.release(inode)

    async def cat(self, path: str, piece_bytes: int = 128 * KIB) -> bytes:
        """Open, read to the end, release: what `cat` does, with the kernel's piece size."""
        whole = bytearray()
        async with self.opened(path) as inode:
            while piece := await self.read(inode, len(whole), piece_bytes):
                whole += piece
        return bytes(whole)

    async def settled(self) -> None:
        """Until nothing is being filled, the index knows all, and what nobody uses was let go of."""
        holdings = self.engine.holdings
        await until(lambda: self.engine.filler.running_count == 0 and self.ledger.reserved_bytes == 0)
        await self.engine.index.commit([])
        await until(lambda: not holdings._leaving and all(held.users for held in holdings._held.values()))
        await self.engine.index.commit([])

    def counted(self, name: str, *labels: str) -> float:
        """A counter of the tally by its exported name; 0 when nothing was counted."""
        return self.tally.samples().get((name, labels), 0.0)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll for a condition; fails when the deadline passes."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other tasks and threads
            await trio.sleep(0.002)


def warm_on(place: Path, data_count: int = 2, parity_count: int = 1, *, count: int | None = None, **more: Any) -> WarmSettings:
    """Targets below `place`, as many as there are shards unless `count` is given."""
    paths = [place / f"target{number}" for number in range(count or data_count + parity_count)]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    return WarmSettings(targets=tuple(map(str, paths)), data_shards=data_count, parity_shards=parity_count, **more)


def dataset_on(cold: Cold, *, replica: Tier | None = None, ttl_seconds: float = 60.0) -> Dataset:
    return Dataset(DATASET, cold, cold, "", ttl_seconds, replica=replica)


def limits(
    chunk_bytes: int = CHUNK_BYTES, *, whole_file_bytes: int = 64 * MIB, read_ahead_bytes: int = 8 * MIB, negative: float = 0.0
) -> Limits:
    return Limits(chunk_bytes, whole_file_bytes, read_ahead_bytes, negative)


def ledger_of(capacity_bytes: int, held_bytes: int = 0, name: str = "hot") -> Ledger:
    return Ledger(
        name,
        capacity_bytes=capacity_bytes,
        min_free_bytes=0,
        high_ratio=0.95,
        low_ratio=0.90,
        block_bytes=4096,
        held_bytes=held_bytes,
        free_bytes=1 << 40,
        total_bytes=1 << 41,
    )


def hot_tier(home: Path, count: int = 1) -> HotTier:
    directories = []
    for position in range(count):
        path = home / f"hot{position}"
        path.mkdir(exist_ok=True)
        directories.append(HotDirectory(position, path))
    return HotTier(directories)


@asynccontextmanager
async def engine_on(
    home: Path,
    cold: Cold,
    *,
    index: Index | None = None,
    files: HotTier | None = None,
    replica: Tier | None = None,
    capacity_bytes: int = 1 << 30,
    ttl_seconds: float = 60.0,
    numbers: Limits | None = None,
    clock: Clock | None = None,
    seed: int = 0,
    warm: WarmSettings | None = None,
    publication: Publication | None = None,
) -> AsyncIterator[Mounted]:
    """An engine with its nursery, cancelled at the end of the block. Hot directories lie below `home`."""
    index = MemoryIndex() if index is None else index
    files = hot_tier(home) if files is None else files
    clock = Clock() if clock is None else clock
    tally = Tally(Metrics())
    each_bytes = capacity_bytes // len(files.directories)
    ledgers = [ledger_of(each_bytes, index.held_bytes(position)) for position in range(len(files.directories))]
    async with trio.open_nursery() as nursery:
        warm_set = await open_warm(nursery, warm, tally, home, str(home / "mnt"), []) if warm is not None else None
        engine = Engine(
            nursery,
            [dataset_on(cold, replica=replica, ttl_seconds=ttl_seconds)],
            index,
            files,
            ledgers,
            limits() if numbers is None else numbers,
            tally,
            single=True,
            clock=clock,
            rng=random.Random(seed),
            publication=publication,
            warm=warm_set,
        )
        yield Mounted(engine, tally, clock, files)
        nursery.cancel_scope.cancel()
    if warm_set is not None:
        await warm_set.aclose()


def occupied_bytes(files: HotTier, directory: int = 0) -> int:
    """What `du` finds in a hot directory, its files alone."""
    return sum(found for _, _, found in files.walk(directory))
