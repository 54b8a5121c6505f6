"""What is remembered of names is what the index has, whatever happens at the same time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import trio

from tests.engine.engines import Lagging
from tiercache.core.record import ROOT_INODE, Entry, Inode, Kind, Link, ObjectId
from tiercache.engine import names as module
from tiercache.engine.names import NameChange, Names
from tiercache.errors import HotSick
from tiercache.index.index import Change, DropEntry, PutEntry
from tiercache.index.memory import MemoryIndex

NAMES = [b"a", b"b", b"c", b"d"]


class Slow(Lagging):
    """Commits take a while and come back in any order; what was begun is done, also when its caller has gone."""

    def __init__(self, nursery: trio.Nursery, rng: random.Random) -> None:
        super().__init__(MemoryIndex())
        self.reads_count = 0
        self.running_count = 0
        self._nursery = nursery
        self._rng = rng

    async def commit(self, changes: Sequence[Change], *, sync: bool = False) -> None:
        done = trio.Event()
        self.running_count += 1
        self._nursery.start_soon(self._commit, changes, done)
        await done.wait()
        for _ in range(self._rng.randrange(6)):
            await trio.lowlevel.checkpoint()
        if self.failing is not None:
            raise self.failing()

    async def _commit(self, changes: Sequence[Change], done: trio.Event) -> None:
        for _ in range(self._rng.randrange(6)):
            await trio.lowlevel.checkpoint()
        if self.failing is None:
            await self.index.commit(changes)
        self.running_count -= 1
        done.set()

    def link(self, parent: Inode, name: bytes) -> Link | None:
        self.reads_count += 1
        return super().link(parent, name)


def entry_of(name: bytes, number: int) -> Entry:
    object_id = ObjectId(number.to_bytes(20, "big"))
    return Entry(Inode(1000 + number), ROOT_INODE, name, Kind.FILE, "data", name.decode(), f"v{number}:1", 1, number, object_id)


async def test_what_was_read_or_written_is_not_read_again() -> None:
    async with trio.open_nursery() as nursery:
        index = Slow(nursery, random.Random(0))
        names = Names(index)
        await names.commit([PutEntry(entry_of(b"a", 1), 5.0)])
        assert names.child(ROOT_INODE, b"a") == entry_of(b"a", 1)
        assert index.reads_count == 0
        other = Names(index)
        for _ in range(3):
            assert other.child(ROOT_INODE, b"a") == entry_of(b"a", 1)
        assert index.reads_count == 1


async def test_no_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 10)
    async with trio.open_nursery() as nursery:
        names = Names(Slow(nursery, random.Random(0)))
        for number in range(50):
            await names.commit([PutEntry(entry_of(b"%d" % number, number), 1.0)])
            for known in range(number + 1):
                assert names.child(ROOT_INODE, b"%d" % known) == entry_of(b"%d" % known, known)
        assert len(names._lately.links) == len(names._lately.entries) == 10


@pytest.mark.parametrize("seed", range(60))
async def test_it_is_what_the_index_has(seed: int) -> None:
    rng = random.Random(seed)
    numbers = iter(range(1, 10_000))

    def change() -> NameChange:
        name = rng.choice(NAMES)
        return DropEntry(ROOT_INODE, name) if rng.random() < 0.3 else PutEntry(entry_of(name, next(numbers)), rng.random())

    async def commits(index: Slow, names: Names) -> None:
        for _ in range(20):
            with trio.CancelScope() as scope:
                if rng.random() < 0.2:
                    trio.lowlevel.current_trio_token().run_sync_soon(scope.cancel)
                await names.commit([change() for _ in range(rng.randrange(1, 4))])
            if not index.running_count and not names._lately._commits_count:  # all that was begun is known
                check(index, names)
            names.child(ROOT_INODE, rng.choice(NAMES))

    def check(index: Slow, names: Names) -> None:
        for name in NAMES:
            link = names.link(ROOT_INODE, name)
            assert link == index.index.link(ROOT_INODE, name)
            assert link is None or names.entry(link.inode) == index.index.entry(link.inode)

    async with trio.open_nursery() as keeping:
        index = Slow(keeping, rng)
        names = Names(index)
        async with trio.open_nursery() as nursery:
            for _ in range(rng.choice([1, 3])):
                nursery.start_soon(commits, index, names)
    check(index, names)


async def test_a_refused_commit_leaves_nothing_behind() -> None:
    async with trio.open_nursery() as nursery:
        index = Slow(nursery, random.Random(0))
        names = Names(index)
        await names.commit([PutEntry(entry_of(b"a", 1), 1.0)])
        index.failing = lambda: HotSick("no")
        await names.commit([PutEntry(entry_of(b"a", 2), 2.0)])
        assert names.child(ROOT_INODE, b"a") == entry_of(b"a", 2)
        index.failing = None
        await names.commit([PutEntry(entry_of(b"a", 3), 3.0)])
        assert names.child(ROOT_INODE, b"a") == entry_of(b"a", 3)
        assert not names._lately._unsure_links
