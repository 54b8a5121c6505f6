"""Many tasks at once, with answers that arrive late and commits that take their time.

Every answer of the store is made when the request starts and arrives after a random delay (so answers overtake each other), on
trio's mock clock. What a call says must have been true between one time to live before it began and
its end; a call that begins after a refresh has ended sees nothing older than the refresh's beginning. That a name
is a file takes two answers at times (the key is there, nothing is below it), so the key alone is judged.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from tiercache.core.naming import decode, encode
from tiercache.core.record import ROOT_INODE, Entry, Kind, Page
from tiercache.engine.dataset import Dataset
from tiercache.engine.namespace import Namespace
from tiercache.errors import NotFound
from tiercache.index.index import Change
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.tier import MAX_PAGE

KEYS = ["a", "b", "c", "x", "x-1", "x-2", "x/a", "x/b", "x/a/b", "y/a", "y/b"]
NAMES = sorted({part for key in KEYS for part in key.split("/")})
TTL_SECONDS = 5.0
SECONDS = 120.0


class SlowCold(MemoryCold):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        page = await super().list(prefix, delimiter=delimiter, token=token, limit=min(limit, 3))
        await trio.sleep(self._rng.choice([0.0, 0.1, 1.0]))
        return page


class SlowIndex(MemoryIndex):
    """Commits in the order of the calls, each after a while, as a writer thread does."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._turn = trio.Lock()

    async def commit(self, changes: Sequence[Change], *, sync: bool = False) -> None:
        async with self._turn:
            await trio.sleep(self._rng.choice([0.0, 0.01, 0.2]))
            self.submit(changes)


class Interleaved:
    def __init__(self, seed: int, nursery: trio.Nursery) -> None:
        self.rng = random.Random(seed)
        self.store = SlowCold(self.rng)
        self.truth: dict[str, str] = {}
        self.states: list[tuple[float, dict[str, str]]] = [(-1.0, {})]
        self.floor_seconds = -1.0
        self.judged = 0
        self.names = Namespace(
            SlowIndex(self.rng),
            [Dataset("data", self.store, self.store, "", TTL_SECONDS)],
            single=True,
            negative_ttl_seconds=1.0,
            clock=trio.current_time,
            on_unreachable=lambda _dataset, _count: None,
            nursery=nursery,
        )

    def change(self) -> None:
        key = self.rng.choice(KEYS)
        if key in self.truth and self.rng.random() < 0.5:
            self.store.delete(key)
            del self.truth[key]
        else:
            self.truth[key] = self.store.put(key, str(self.rng.random()).encode()).version
        self.states.append((trio.current_time(), dict(self.truth)))

    def judge(self, began: float, floor: float, prefix: str, name: str, entry: Entry | None) -> None:
        oldest = max(began - TTL_SECONDS, floor)
        said = "absent" if entry is None else entry.version or "directory"
        ends = [start for start, _ in self.states[1:]] + [float("inf")]
        allowed: set[str] = set()
        for (_, state), end in zip(self.states, ends, strict=True):
            if end > oldest:
                allowed.add(state.get(prefix + name, "absent"))
                if any(key.startswith(f"{prefix}{name}/") for key in state):
                    allowed.add("directory")
        assert said in allowed, f"{prefix}{name} is {said} at {trio.current_time()}, began {began}, floor {floor}"
        self.judged += 1

    async def mutate(self) -> None:
        while True:
            await trio.sleep(self.rng.choice([0.01, 0.3, 1.0, 8.0]))
            self.change()

    async def look(self) -> None:
        while True:
            await trio.sleep(self.rng.choice([0.0, 0.05, 0.5, 3.0]))
            entry = self.names.entry(ROOT_INODE)
            prefix = ""
            for name in self.rng.choice(KEYS).split("/"):
                if entry is None or entry.kind is not Kind.DIRECTORY:
                    break
                began, floor = trio.current_time(), self.floor_seconds
                parent = entry
                try:
                    if self.rng.random() < 0.1 and entry.inode != ROOT_INODE:
                        parent = await self.names.revalidate(entry)
                    entry, _ = await self.names.lookup(parent.inode, encode(name))
                except NotFound:
                    entry = None
                    if parent.kind is not Kind.DIRECTORY or not self.names.is_current(parent):
                        break
                self.judge(began, floor, prefix, name, entry)
                prefix += f"{name}/"

    async def list_directories(self) -> None:
        while True:
            await trio.sleep(self.rng.choice([0.5, 3.0]))
            prefix = self.rng.choice(["", "x/", "y/"])
            began, floor = trio.current_time(), self.floor_seconds
            found: dict[str, Entry] = {}
            try:
                directory = await self.names.resolve("data", prefix)
                if directory.kind is not Kind.DIRECTORY:
                    continue
                stream = await self.names.open_directory(directory.inode)
                position = 0
                while batch := await stream.read(position):
                    found.update((decode(entry.name), entry) for entry, _ in batch)
                    position = batch[-1][1]
            except NotFound:
                continue
            for name in NAMES:
                if name in found:
                    self.judge(began - TTL_SECONDS, floor, prefix, name, found[name])

    async def refresh(self) -> None:
        while True:
            await trio.sleep(self.rng.choice([2.0, 10.0]))
            began = trio.current_time()
            await self.names.refresh("data", "")
            self.floor_seconds = max(self.floor_seconds, began)


@pytest.mark.parametrize("seed", range(12))
def test_interleaved_answers_never_bring_back_what_was_older(seed: int) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            run = Interleaved(seed, nursery)
            for _ in range(2):
                nursery.start_soon(run.mutate)
                nursery.start_soon(run.list_directories)
            for _ in range(6):
                nursery.start_soon(run.look)
            nursery.start_soon(run.refresh)
            await trio.sleep(SECONDS)
            assert run.judged > 300
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
