"""A mount of a store in memory, as the tests of the namespace see it: with a clock, faults and answers that come late."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from tiercache.core.record import Entry, Listed, ObjectRef, Page
from tiercache.engine.dataset import Dataset
from tiercache.engine.namespace import DirectoryStream, Namespace
from tiercache.errors import HotSick, Unavailable
from tiercache.index.index import Change
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.faulty import Faulty, Script
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.tier import MAX_PAGE, Cold, Sink

TTL_SECONDS = 60.0


def out_of_order() -> Unavailable:
    return Unavailable("the store is out of order")


class Late:
    """A store whose answers are made when they are asked for and arrive when they are let go."""

    def __init__(self, cold: Cold) -> None:
        self.name = cold.name
        self.source_id = cold.source_id
        self.holding = False
        self.prefix = ""
        self.waiting: list[trio.Event] = []
        self._cold = cold

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        page = await self._cold.list(prefix, delimiter=delimiter, token=token, limit=limit)
        if self.holding and self.prefix in ("", prefix):
            self.waiting.append(trio.Event())
            await self.waiting[-1].wait()
        return page

    async def head(self, key: str) -> Listed:
        return await self._cold.head(key)

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        await self._cold.read(ref, offset, length, sink)

    async def aclose(self) -> None:
        await self._cold.aclose()


class SickIndex(MemoryIndex):
    """An index on a disk that can fail."""

    sick = False

    async def commit(self, changes: Sequence[Change], *, sync: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        if self.sick:
            raise HotSick("index: no space left on the cache disk")
        await super().commit(changes, sync=sync)


class World:
    """One mount of one store, with a clock that stands still until it is moved."""

    def __init__(self, nursery: trio.Nursery, index: MemoryIndex | None = None) -> None:
        self.store = MemoryCold()
        self.script = Script()
        self.late = Late(Faulty(self.store, self.script))
        self.index = SickIndex() if index is None else index
        self.now = 1_000_000.0
        self.unreachable: dict[str, int] = {}
        self.nursery = nursery

    def mount(self, *, ttl: float = TTL_SECONDS, prefix: str = "", name: str = "data", negative: float = 5.0) -> Namespace:
        return self.mount_all([Dataset(name, self.late, self.late, prefix, ttl)], single=True, negative=negative)

    def mount_all(self, datasets: Sequence[Dataset], *, single: bool = False, negative: float = 5.0) -> Namespace:
        return Namespace(
            self.index,
            datasets,
            single=single,
            negative_ttl_seconds=negative,
            clock=lambda: self.now,
            on_unreachable=self.unreachable.__setitem__,
            nursery=self.nursery,
        )

    @property
    def lists(self) -> int:
        return self.store.requests["list"]


@asynccontextmanager
async def worlds(index: MemoryIndex | None = None) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(nursery, index)
        nursery.cancel_scope.cancel()


async def names_of(stream: DirectoryStream) -> list[bytes]:
    return [entry.name for entry in await entries_of(stream)]


async def entries_of(stream: DirectoryStream) -> list[Entry]:
    found: list[Entry] = []
    position = 0
    while batch := await stream.read(position):
        found += [entry for entry, _ in batch]
        position = batch[-1][1]
    return found
