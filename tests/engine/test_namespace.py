"""The namespace against a store in memory: what names lead to, what it costs, and what happens in between."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tiercache.core import record
from tiercache.core.record import ROOT_INODE, Entry, Inode, Kind, Listed, ObjectRef, Page
from tiercache.engine import recorder
from tiercache.engine.dataset import Dataset
from tiercache.engine.namespace import DirectoryStream, NameNotFound, Namespace
from tiercache.errors import BadResponse, HotSick, NotFound, Unavailable, VersionChanged
from tiercache.index.index import Change
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.faulty import Faulty, Script, failing
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


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with worlds() as made:
        yield made


async def names_of(stream: DirectoryStream) -> list[bytes]:
    return [entry.name for entry in await entries_of(stream)]


async def entries_of(stream: DirectoryStream) -> list[Entry]:
    found: list[Entry] = []
    position = 0
    while batch := await stream.read(position):
        found += [entry for entry, _ in batch]
        position = batch[-1][1]
    return found


# -- lookups


async def test_a_lookup_costs_one_list_and_then_nothing_while_it_is_fresh(world: World) -> None:
    world.store.put("a/b.jpg", b"12345", mtime_seconds=77)
    names = world.mount()
    directory, seconds = await names.lookup(ROOT_INODE, b"a")
    assert (directory.kind, seconds) == (Kind.DIRECTORY, TTL_SECONDS)
    entry, _ = await names.lookup(directory.inode, b"b.jpg")
    assert (entry.kind, entry.key, entry.size_bytes, entry.mtime_seconds) == (Kind.FILE, "a/b.jpg", 5, 77)
    assert entry.ref == world.store.ref("a/b.jpg")
    assert names.entry(entry.inode) == entry
    assert world.lists == 2
    world.now += 59
    again, seconds = await names.lookup(directory.inode, b"b.jpg")
    assert (again, seconds) == (entry, 1.0)
    assert world.lists == 2
    world.now += 1
    again, seconds = await names.lookup(directory.inode, b"b.jpg")
    assert (again, seconds) == (entry, TTL_SECONDS)
    assert world.store.requests == {"list": 3}


async def test_an_open_in_a_prefix_of_20000_objects_costs_two_lists(world: World) -> None:
    for number in range(20_000):
        world.store.put(f"big/{number:05}.jpg", b"x")
    names = world.mount()
    entry = await names.resolve("data", "big/12345.jpg")
    assert entry.key == "big/12345.jpg"
    await wait_all_tasks_blocked()
    assert world.lists == 2


async def test_case_15_a_name_behind_sixteen_siblings_costs_a_second_list(world: World) -> None:
    for number in range(20):
        world.store.put(f"x-{number:02}", b"")
    world.store.put("x/below", b"")
    names = world.mount()
    assert (await names.lookup(ROOT_INODE, b"x"))[0].kind is Kind.DIRECTORY
    assert world.lists == 2
    world.store.delete("x/below")
    world.store.put("x", b"1")
    world.now += TTL_SECONDS
    assert (await names.lookup(ROOT_INODE, b"x"))[0].kind is Kind.FILE
    world.store.delete("x")
    world.now += TTL_SECONDS
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INODE, b"x")


async def test_absent_names_carry_how_long_the_kernel_may_believe_it(world: World) -> None:
    names = world.mount(negative=7.0)
    with pytest.raises(NameNotFound, match="data/nothing does not exist") as caught:
        await names.lookup(ROOT_INODE, b"nothing")
    assert caught.value.negative_ttl_seconds == 7.0
    await names_of(await names.open_directory(ROOT_INODE))
    lists = world.lists
    world.now += TTL_SECONDS - 2
    with pytest.raises(NameNotFound) as caught:
        await names.lookup(ROOT_INODE, b"nothing")
    assert caught.value.negative_ttl_seconds == 2.0
    assert world.lists == lists


async def test_names_that_posix_cannot_have_are_absent_without_a_request(world: World) -> None:
    names = world.mount()
    for name in (b"L" * 256, b"..", b"a/b", b""):
        with pytest.raises(NotFound):
            await names.lookup(ROOT_INODE, name)
    assert world.lists == 0


async def test_concurrent_lookups_share_a_request_and_one_that_is_cancelled_takes_nothing_away(world: World) -> None:
    world.store.put("f", b"1")
    names = world.mount()
    gate = world.store.hold("list")
    found: list[Entry] = []

    async def look() -> None:
        found.append((await names.lookup(ROOT_INODE, b"f"))[0])

    async with trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def cancelled() -> None:
            with first:
                await look()

        nursery.start_soon(cancelled)
        await gate.reached.wait()
        for _ in range(5):
            nursery.start_soon(look)
        await wait_all_tasks_blocked()
        first.cancel()
        await wait_all_tasks_blocked()
        gate.release()
    assert len(found) == 5
    assert world.lists == 1


async def test_a_failure_reaches_everybody_who_waits_and_is_not_remembered(world: World) -> None:
    world.store.put("f", b"1")
    names = world.mount()
    world.script.left += failing("list", out_of_order, 1)
    failures: list[Unavailable] = []

    async def look() -> None:
        try:
            await names.lookup(ROOT_INODE, b"f")
        except Unavailable as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(look)
    assert len(failures) == 3
    assert len({id(error) for error in failures}) == 3
    assert (await names.lookup(ROOT_INODE, b"f"))[0].name == b"f"


async def test_waiters_get_an_error_when_the_daemon_stops(world: World) -> None:
    async with trio.open_nursery() as inner:
        names = World(inner, world.index)
        names.store.put("f", b"1")
        gate = names.store.hold("list")
        mounted = names.mount()
        caught: list[str] = []

        async def look() -> None:
            with pytest.raises(Unavailable, match="stopping") as error:
                await mounted.lookup(ROOT_INODE, b"f")
            caught.append(str(error.value))

        async def read() -> None:
            with pytest.raises(Unavailable, match="stopping") as error:
                await names_of(await mounted.open_directory(ROOT_INODE))
            caught.append(str(error.value))

        world.nursery.start_soon(look)
        world.nursery.start_soon(read)
        await gate.reached.wait()
        await wait_all_tasks_blocked()
        inner.cancel_scope.cancel()
    await wait_all_tasks_blocked()
    assert len(caught) == 2


# -- versions


@pytest.mark.parametrize("data", [b"22222", b"333333"])
async def test_case_1_and_4_an_overwrite_is_a_new_inode_after_the_time_to_live(world: World, data: bytes) -> None:
    world.store.put("f", b"11111")
    names = world.mount()
    old, _ = await names.lookup(ROOT_INODE, b"f")
    world.store.put("f", data)
    assert (await names.lookup(ROOT_INODE, b"f"))[0] == old
    world.now += TTL_SECONDS
    new, _ = await names.lookup(ROOT_INODE, b"f")
    assert new.inode != old.inode
    assert new.ref == world.store.ref("f")
    assert not await names.is_current(old)
    assert await names.is_current(new)
    assert names.entry(old.inode) == old, "an open handle still needs it"
    assert names.ttl_seconds(old) == 0
    assert math.isinf(names.age_seconds(old))


async def test_case_1_revalidate_sees_an_overwrite_at_once(world: World) -> None:
    world.store.put("f", b"11111")
    names = world.mount(ttl=math.inf)
    old, _ = await names.lookup(ROOT_INODE, b"f")
    assert await names.revalidate(old) == old
    world.now += 10
    assert names.age_seconds(old) == 10
    world.store.put("f", b"22222")
    new = await names.revalidate(old)
    assert new.version == world.store.ref("f").version
    assert (await names.lookup(ROOT_INODE, b"f"))[0] == new
    world.store.delete("f")
    with pytest.raises(NotFound):
        await names.revalidate(new)
    assert not await names.is_current(new)


async def test_case_1_revalidate_does_not_share_a_request_that_may_be_too_old(world: World) -> None:
    world.store.put("f", b"11111")
    names = world.mount()
    world.late.holding = True
    results: list[Entry] = []

    async def look() -> None:
        results.append((await names.lookup(ROOT_INODE, b"f"))[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await wait_all_tasks_blocked()
        world.store.put("f", b"22222")
        old = Entry(Inode(9), ROOT_INODE, b"f", Kind.FILE, "data", "f", "", 5, 0, world.store.ref("f").object_id)

        async def again() -> None:
            results.append(await names.revalidate(old))

        nursery.start_soon(again)
        nursery.start_soon(again)
        await wait_all_tasks_blocked()
        world.late.holding = False
        world.late.waiting[0].set()
    assert [entry.version == world.store.ref("f").version for entry in results] == [False, True, True]
    assert world.lists == 2


async def test_case_1_an_older_answer_that_comes_later_does_not_undo_a_newer_one(world: World) -> None:
    world.store.put("f", b"11111")
    world.store.put("gone", b"1")
    names = world.mount()
    gone, _ = await names.lookup(ROOT_INODE, b"gone")
    world.late.holding = True
    stream = await names.open_directory(ROOT_INODE)
    await wait_all_tasks_blocked()
    world.late.holding = False
    world.store.put("f", b"22222")
    world.store.put("young", b"1")
    world.store.delete("gone")
    new, _ = await names.lookup(ROOT_INODE, b"f")
    young, _ = await names.lookup(ROOT_INODE, b"young")
    with pytest.raises(NotFound):
        await names.revalidate(gone)
    world.late.waiting[0].set()
    assert set(await names_of(stream)) == {b"f"}
    assert (await names.lookup(ROOT_INODE, b"f"))[0] == new
    assert (await names.lookup(ROOT_INODE, b"young"))[0] == young
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INODE, b"gone")


async def test_case_2_a_deleted_name_is_absent_after_the_time_to_live(world: World) -> None:
    world.store.put("f", b"1")
    world.store.put("d/f", b"1")
    names = world.mount()
    entry, _ = await names.lookup(ROOT_INODE, b"f")
    below = await names.resolve("data", "d/f")
    world.store.delete("f")
    world.store.delete("d/f")
    assert (await names.lookup(ROOT_INODE, b"f"))[0] == entry
    world.now += TTL_SECONDS
    for path in ("f", "d", "d/f"):
        with pytest.raises(NotFound):
            await names.resolve("data", path)
    assert names.entry(entry.inode) == entry
    assert names.entry(below.inode) == below


async def test_the_same_bytes_again_are_the_same_inode_and_a_new_time_is_shown(world: World) -> None:
    world.store.put("f", b"1", mtime_seconds=10)
    names = world.mount()
    old, _ = await names.lookup(ROOT_INODE, b"f")
    world.store.put("f", b"2", mtime_seconds=20)
    world.now += TTL_SECONDS
    await names.lookup(ROOT_INODE, b"f")
    world.store.put("f", b"1", mtime_seconds=30)
    world.now += TTL_SECONDS
    new, _ = await names.lookup(ROOT_INODE, b"f")
    assert (new.inode, new.mtime_seconds) == (old.inode, 30)
    await world.index.prune()
    assert names.entry(new.inode) == new


async def test_case_22_inode_numbers_and_times_survive_the_loss_of_the_index(world: World) -> None:
    for key in ("a/b/f", "a/g", "h"):
        world.store.put(key, key.encode(), mtime_seconds=5)
    paths = ["", "a", "a/b", "a/b/f", "a/g", "h"]
    names = world.mount()
    before = [await names.resolve("data", path) for path in paths]
    world.index = SickIndex()
    names = world.mount()
    await names_of(await names.open_directory(ROOT_INODE))
    assert [await names.resolve("data", path) for path in paths] == before


async def test_colliding_inode_numbers_are_told_apart_and_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(dataset: str, path: str, version: str, attempt: int = 0) -> Inode:
        return Inode(2 + (record.inode_number(dataset, path, version) + attempt) % 23)

    monkeypatch.setattr(recorder, "inode_number", small)
    for number in range(20):
        world.store.put(f"f{number}", b"%d" % number)
    names = world.mount()
    entries = await entries_of(await names.open_directory(ROOT_INODE))
    assert len({entry.inode for entry in entries}) == 20
    assert all(names.entry(entry.inode) == entry for entry in entries)
    world.now += TTL_SECONDS
    assert await entries_of(await names.open_directory(ROOT_INODE)) == entries


async def test_case_17_an_archived_object_is_an_entry_that_says_so_and_a_restored_one_does_not(world: World) -> None:
    world.store.put("f", b"1", archived=True)
    names = world.mount()
    entry, _ = await names.lookup(ROOT_INODE, b"f")
    assert entry.archived
    world.store.put("f", b"1")
    restored = await names.revalidate(entry)
    assert (restored.archived, restored.inode) == (False, entry.inode)


async def test_a_directory_that_nobody_knows_is_looked_up_again_by_the_kernel(world: World) -> None:
    names = world.mount()
    with pytest.raises(VersionChanged, match="77"):
        await names.lookup(Inode(77), b"f")
    with pytest.raises(VersionChanged):
        await names.open_directory(Inode(77))


async def test_a_file_is_not_a_directory(world: World) -> None:
    world.store.put("f", b"1")
    names = world.mount()
    with pytest.raises(NotFound, match="f is a file"):
        await names.resolve("data", "f/g")
    entry = await names.resolve("data", "f")
    with pytest.raises(NotFound, match="f is a file"):
        await names.open_directory(entry.inode)


async def test_a_clock_that_steps_back_costs_a_request_and_no_stale_name(world: World) -> None:
    world.store.put("f", b"1")
    names = world.mount()
    await names_of(await names.open_directory(ROOT_INODE))
    world.now -= 100_000
    world.store.put("f", b"2")
    new, seconds = await names.lookup(ROOT_INODE, b"f")
    assert (new.version, seconds) == (world.store.ref("f").version, TTL_SECONDS)
    world.store.delete("f")
    world.now += TTL_SECONDS
    assert await names_of(await names.open_directory(ROOT_INODE)) == []
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INODE, b"f")


# -- listings


async def test_a_listing_answers_for_present_and_absent_names_until_it_is_too_old(world: World) -> None:
    for key in ("a", "b", "d/x"):
        world.store.put(key, b"1")
    names = world.mount()
    entries = await entries_of(await names.open_directory(ROOT_INODE))
    assert {entry.name: entry.kind for entry in entries} == {b"a": Kind.FILE, b"b": Kind.FILE, b"d": Kind.DIRECTORY}
    assert all(names.ttl_seconds(entry) == TTL_SECONDS for entry in entries)
    assert set(await names_of(await names.open_directory(ROOT_INODE))) == {b"a", b"b", b"d"}
    await names.lookup(ROOT_INODE, b"a")
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INODE, b"c")
    assert world.lists == 1
    world.store.put("c", b"1")
    world.store.delete("b")
    world.now += TTL_SECONDS
    assert set(await names_of(await names.open_directory(ROOT_INODE))) == {b"a", b"c", b"d"}
    assert world.lists == 2
    world.now += TTL_SECONDS - 1
    await names.lookup(ROOT_INODE, b"a")
    assert world.lists == 2, "a listing renews entries that it does not write again"


async def test_case_20_the_first_names_come_before_the_last_page(world: World) -> None:
    for number in range(2500):
        world.store.put(f"{number:04}", b"")
    names = world.mount()
    world.late.holding = True
    stream = await names.open_directory(ROOT_INODE)
    second = await names.open_directory(ROOT_INODE)
    await wait_all_tasks_blocked()
    world.late.waiting[0].set()
    batch = await stream.read(0)
    assert batch[0][0].name == b"0000"
    assert await stream.read(0) == batch
    await wait_all_tasks_blocked()
    assert len(world.late.waiting) == 2, "the second page has not come"
    world.late.holding = False
    world.late.waiting[1].set()
    expected = [b"%04d" % number for number in range(2500)]
    assert await names_of(stream) == await names_of(second) == expected
    assert world.lists == 3
    assert await names_of(await names.open_directory(ROOT_INODE)) == expected
    assert world.lists == 3


async def test_case_20_an_open_directory_takes_less_than_200_bytes_a_name_while_it_is_listed(world: World) -> None:
    for number in range(10_001):
        world.store.put(f"{number:08}.jpg", b"")
    names = world.mount()
    world.late.holding = True
    tracemalloc.start()
    try:
        stream = await names.open_directory(ROOT_INODE)
        for page in range(10):
            await wait_all_tasks_blocked()
            world.late.waiting[page].set()
        position = 0
        while position < 9_999:
            position = (await stream.read(position))[-1][1]
        await wait_all_tasks_blocked()
        assert len(world.late.waiting) == 11, "the last page has not come"
        ours = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, "*/engine/listing.py"), tracemalloc.Filter(True, "*/core/naming.py")]
        )
    finally:
        tracemalloc.stop()
    held_bytes = sum(row.size for row in ours.statistics("filename"))
    assert 50 < held_bytes / 10_000 < 200
    world.late.waiting[10].set()
    assert len(await stream.read(9_999)) + len(await stream.read(10_000)) >= 1


async def test_case_5_a_failed_listing_is_an_error_and_is_not_stored(world: World) -> None:
    for number in range(2500):
        world.store.put(f"{number:04}", b"")
    names = world.mount()
    world.script.left += failing("list", out_of_order, 1)
    stream = await names.open_directory(ROOT_INODE)
    with pytest.raises(Unavailable, match="out of order"):
        await stream.read(0)
    with pytest.raises(Unavailable, match="out of order"):
        await stream.read(0)
    assert world.index.directory(ROOT_INODE) is None

    world.late.holding = True
    stream = await names.open_directory(ROOT_INODE)
    await wait_all_tasks_blocked()
    world.script.left += failing("list", out_of_order, 1)
    world.late.holding = False
    world.late.waiting[0].set()
    await wait_all_tasks_blocked()
    seen = 0
    while seen < 999:
        seen = (await stream.read(seen))[-1][1]
    with pytest.raises(Unavailable):
        await stream.read(seen)
    assert world.index.directory(ROOT_INODE) is None
    assert len(await names_of(await names.open_directory(ROOT_INODE))) == 2500


async def test_case_5_a_failed_listing_drops_no_name(world: World) -> None:
    for number in range(1500):
        world.store.put(f"{number:04}", b"")
    names = world.mount()
    await names_of(await names.open_directory(ROOT_INODE))
    world.now += TTL_SECONDS
    world.script.left += failing("list", out_of_order, 1)
    assert len(await names_of(await names.open_directory(ROOT_INODE))) == 1500, "what was known is believed"
    assert len(world.index.names(ROOT_INODE, b"", 2000)) == 1500


async def test_a_store_that_repeats_a_page_for_ever_is_an_error(world: World) -> None:
    class Stuck(Late):
        async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
            return Page((), (), "again")

    stuck = Stuck(world.store)
    names = world.mount_all([Dataset("data", stuck, stuck, "", 60.0)], single=True)
    with pytest.raises(BadResponse, match="twice"):
        await names_of(await names.open_directory(ROOT_INODE))
    walk = await names.walk("data", "")
    with pytest.raises(BadResponse, match="twice"):
        await walk.page()


async def test_a_deleted_directory_is_absent_and_not_empty(world: World) -> None:
    world.store.put("d/f", b"1")
    names = world.mount()
    directory = await names.resolve("data", "d")
    world.store.delete("d/f")
    with pytest.raises(NotFound):
        await names_of(await names.open_directory(directory.inode))
    assert not await names.is_current(directory)
    with pytest.raises(NotFound):
        await names.resolve("data", "d")


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_directory_that_goes_and_comes_back_brings_nothing_back(world: World, replaced: bool) -> None:
    world.store.put("d/old", b"1")
    world.store.put("d/e/old", b"1")
    names = world.mount(ttl=math.inf)
    old = await names.resolve("data", "d/old")
    below = await names.resolve("data", "d/e/old")
    world.store.delete("d/old")
    world.store.delete("d/e/old")
    if replaced:
        world.store.put("d", b"a file")
    await names.refresh("data", "")
    for entry in (old, below):
        assert not await names.is_current(entry)
        with pytest.raises(NotFound):
            await names.lookup(entry.parent, b"old")
    world.store.put("d/new", b"1")
    world.store.put("d/e/new", b"1")
    await names.refresh("data", "")
    assert (await names.resolve("data", "d/new")).parent == old.parent
    assert (await names.resolve("data", "d/e/new")).parent == below.parent
    for path in ("d/old", "d/e/old"):
        with pytest.raises(NotFound):
            await names.resolve("data", path)


async def test_an_empty_dataset_is_an_empty_directory(world: World) -> None:
    names = world.mount(prefix="some/prefix/")
    assert await names_of(await names.open_directory(ROOT_INODE)) == []


async def test_lookups_pay_for_a_listing_page_by_page(world: World) -> None:
    for number in range(5000):
        world.store.put(f"{number:04}", b"")
    names = world.mount()
    costs = []
    for number in range(20):
        await names.lookup(ROOT_INODE, b"%04d" % (4999 - number))
        await wait_all_tasks_blocked()
        costs.append(world.lists)
    assert costs[6] == 7
    assert costs[7] == 9, "the eighth lookup pays for the first page"
    assert all(cost <= 2 * (number + 1) for number, cost in enumerate(costs))
    assert world.index.directory(ROOT_INODE) is not None
    assert costs[11:] == [17] * 9, "after twelve lookups five pages are there, and nothing is asked any more"


async def test_a_background_listing_fails_without_any_one_noticing_and_starts_later(world: World) -> None:
    for number in range(30):
        world.store.put(f"{number:02}", b"")
    names = world.mount()
    for number in range(7):
        await names.lookup(ROOT_INODE, b"%02d" % number)
    world.script.left += [fault for fault in failing("list", out_of_order, 1) if fault.key is None]
    world.script.left[-1] = type(world.script.left[-1])("list", "", error=out_of_order)
    for number in range(7, 15):
        await names.lookup(ROOT_INODE, b"%02d" % number)
        await wait_all_tasks_blocked()
    assert not world.script.left
    assert world.index.directory(ROOT_INODE) is None
    await names.lookup(ROOT_INODE, b"20")
    await wait_all_tasks_blocked()
    assert world.index.directory(ROOT_INODE) is not None


async def test_opendir_takes_over_a_listing_that_rests(world: World) -> None:
    for number in range(3000):
        world.store.put(f"{number:04}", b"")
    names = world.mount()
    for number in range(8):
        await names.lookup(ROOT_INODE, b"%04d" % number)
        await wait_all_tasks_blocked()
    assert world.lists == 9
    assert len(await names_of(await names.open_directory(ROOT_INODE))) == 3000
    assert world.lists == 11


# -- names


async def test_case_15_unreachable_keys_are_counted_and_do_not_disturb_their_siblings(world: World) -> None:
    for key in (
        "ok",
        "a//b",
        "/lead",
        "./dot",
        "../up",
        "L" * 300,
        "x",
        "x/y",
        "d/",
        "e/",
        "new\nline",
        "\udcff",
        "%41",
        "a+b",
        " ",
    ):
        world.store.put(key, b"1" if key == "e/" else b"")
    names = world.mount()
    found = set(await names_of(await names.open_directory(ROOT_INODE)))
    assert found == {b"ok", b"a", b"x", b"d", b"e", b"new\nline", b"\xff", b"%41", b"a+b", b" "}
    assert world.unreachable == {"data": 5}, "'/', './', '../', the long name and the file x"
    state = world.index.directory(ROOT_INODE)
    assert state is not None
    assert (state.unreachable_count, state.entry_count) == (5, 10)
    assert state.example
    assert await names_of(await names.open_directory((await names.resolve("data", "d")).inode)) == []
    assert await names_of(await names.open_directory((await names.resolve("data", "e")).inode)) == []
    assert world.unreachable == {"data": 6}, "and the content of e/"
    assert await names_of(await names.open_directory((await names.resolve("data", "a")).inode)) == []
    assert world.unreachable == {"data": 7}
    assert (await names.resolve("data", "x")).kind is Kind.DIRECTORY
    world.store.delete("x")
    await names.refresh("data", "")
    assert world.unreachable == {"data": 6}
    again = world.mount()
    world.unreachable.clear()
    await again.open_directory(ROOT_INODE)
    assert world.unreachable == {"data": 4}, "known again from the index after a restart"


async def test_case_15_a_file_that_becomes_a_directory_and_back(world: World) -> None:
    world.store.put("x", b"1")
    names = world.mount()
    file, _ = await names.lookup(ROOT_INODE, b"x")
    world.store.put("x/y", b"2")
    world.now += TTL_SECONDS
    directory, _ = await names.lookup(ROOT_INODE, b"x")
    assert (file.kind, directory.kind) == (Kind.FILE, Kind.DIRECTORY)
    assert await names_of(await names.open_directory(directory.inode)) == [b"y"]
    world.store.delete("x/y")
    with pytest.raises(NotFound):
        await names.refresh("data", "x/y/z")
    world.now += TTL_SECONDS
    assert (await names.lookup(ROOT_INODE, b"x"))[0] == file


# -- several datasets, and other sources


async def test_several_datasets_are_directories_of_the_root(world: World) -> None:
    world.store.put("one/f", b"1")
    world.store.put("two/g", b"2")
    both = [Dataset(name, world.late, world.late, f"{name}/", 60.0) for name in ("one", "two")]
    names = world.mount_all(both)
    entries = await entries_of(await names.open_directory(ROOT_INODE))
    assert [entry.name for entry in entries] == [b"one", b"two"]
    assert [names.entry(entry.inode) for entry in entries] == entries
    assert [await names.is_current(entry) for entry in entries] == [True, True]
    assert await names.revalidate(entries[0]) == entries[0]
    directory, seconds = await names.lookup(ROOT_INODE, b"two")
    assert (directory, seconds) == (entries[1], 86_400.0)
    assert (await names.lookup(directory.inode, b"g"))[0].key == "two/g"
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INODE, b"three")
    with pytest.raises(NotFound, match="no dataset 'three'"):
        await names.resolve("three", "x")
    root = names.entry(ROOT_INODE)
    assert root is not None
    assert root.kind is Kind.DIRECTORY
    await world.index.prune()
    assert (await names.lookup(directory.inode, b"g"))[0].key == "two/g"
    assert world.lists == 1


async def test_an_index_of_another_source_answers_nothing(world: World) -> None:
    world.store.put("old", b"1")
    world.store.put("d/old", b"1")
    names = world.mount(ttl=math.inf)
    await names.resolve("data", "d/old")
    await names_of(await names.open_directory(ROOT_INODE))
    directory = await names.resolve("data", "d")
    await names_of(await names.open_directory(directory.inode))
    other = MemoryCold("another bucket")
    other.put("new", b"2")
    other.put("d/new", b"2")
    names = world.mount_all([Dataset("data", other, other, "", math.inf)], single=True)
    with pytest.raises(NotFound):
        await names.resolve("data", "old")
    assert set(await names_of(await names.open_directory(ROOT_INODE))) == {b"new", b"d"}
    with pytest.raises(NotFound):
        await names.resolve("data", "d/old")
    assert (await names.resolve("data", "d/new")).key == "d/new"
    await world.index.prune()
    assert names.entry(directory.inode) is None
    names = world.mount(ttl=math.inf)
    assert set(await names_of(await names.open_directory(ROOT_INODE))) == {b"old", b"d"}
    multi = world.mount_all([Dataset("data", other, other, "", math.inf)])
    assert await names_of(await multi.open_directory(ROOT_INODE)) == [b"data"]
    assert (await multi.resolve("data", "d/new")).key == "d/new"


# -- refresh


async def test_refresh_finds_what_changed_below_and_names_what_the_kernel_must_drop(world: World) -> None:
    for key in ("same", "changed", "gone", "d/changed", "d/e/changed", "looked/f", "never/f"):
        world.store.put(key, b"1")
    names = world.mount(ttl=math.inf)
    for path in ("", "d", "d/e"):
        await names_of(await names.open_directory((await names.resolve("data", path)).inode))
    d, e, looked = [await names.resolve("data", path) for path in ("d", "d/e", "looked")]
    await names.resolve("data", "looked/f")
    with pytest.raises(NotFound):
        await names.resolve("data", "new")
    for key in ("changed", "d/changed", "d/e/changed", "looked/f"):
        world.store.put(key, b"2")
    world.store.delete("gone")
    world.store.put("new", b"3")
    world.store.put("unasked", b"3")
    refreshed = await names.refresh("data", "")
    assert (refreshed.changed_count, refreshed.dropped_count) == (5, 1)
    assert set(refreshed.stale) == {
        (ROOT_INODE, b"changed"),
        (ROOT_INODE, b"gone"),
        (ROOT_INODE, b"new"),
        (d.inode, b"changed"),
        (e.inode, b"changed"),
        (looked.inode, b"f"),
    }
    for key in ("changed", "d/changed", "d/e/changed", "looked/f", "new"):
        assert (await names.resolve("data", key)).version == world.store.ref(key).version


async def test_refresh_of_a_file_and_of_a_path_that_is_gone(world: World) -> None:
    world.store.put("d/f", b"1")
    names = world.mount(ttl=math.inf)
    entry = await names.resolve("data", "d/f")
    refreshed = await names.refresh("data", "d/f")
    assert (refreshed.changed_count, refreshed.dropped_count, refreshed.stale) == (0, 0, [])
    world.store.put("d/f", b"2")
    refreshed = await names.refresh("data", "d/f")
    assert (refreshed.changed_count, refreshed.stale) == (1, [(entry.parent, b"f")])
    world.store.delete("d/f")
    refreshed = await names.refresh("data", "d/f")
    assert (refreshed.dropped_count, refreshed.stale) == (1, [(ROOT_INODE, b"d")])
    with pytest.raises(NotFound):
        await names.refresh("data", "d/f")


async def test_refresh_does_not_believe_a_listing_that_was_started_before(world: World) -> None:
    world.store.put("f", b"1")
    names = world.mount(ttl=math.inf)
    world.late.holding = True
    stream = await names.open_directory(ROOT_INODE)
    await wait_all_tasks_blocked()
    world.store.put("f", b"2")
    world.late.holding = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(names.refresh, "data", "")
        await wait_all_tasks_blocked()
        world.late.waiting[0].set()
    assert (await names.lookup(ROOT_INODE, b"f"))[0].version == world.store.ref("f").version
    assert await names_of(stream) == [b"f"]


@pytest.mark.parametrize("running", [False, True])
async def test_refresh_does_not_believe_what_a_background_listing_has_seen(world: World, running: bool) -> None:
    for number in range(3000):
        world.store.put(f"d/{number:04}", b"1")
    names = world.mount(ttl=math.inf)
    directory = await names.resolve("data", "d")
    for number in range(8):
        await names.lookup(directory.inode, b"%04d" % (2999 - number))
        await wait_all_tasks_blocked()
    known, _ = await names.lookup(directory.inode, b"0000")
    lists = world.lists
    if running:
        world.late.holding, world.late.prefix = True, "d/"
        await names.lookup(directory.inode, b"2900")
        await wait_all_tasks_blocked()
        assert len(world.late.waiting) == 1, "the second page is on its way"
        world.late.holding = False
        lists = world.lists
    world.store.put("d/0000", b"2")
    await names.refresh("data", "")
    assert (await names.lookup(directory.inode, b"0000"))[0].inode != known.inode
    assert world.lists <= lists + 3, "the root, the name, and a page that lookups had paid for"
    for event in world.late.waiting:
        event.set()


async def test_a_failed_refresh_says_so(world: World) -> None:
    world.store.put("f", b"1")
    names = world.mount()
    world.script.left += failing("list", out_of_order, 1)
    with pytest.raises(Unavailable):
        await names.refresh("data", "")


# -- walks


async def test_a_walk_gives_all_files_below_a_prefix_in_pages_and_makes_them_known(world: World) -> None:
    keys = [f"p/{top}/{number:04}" for top in ("a", "b/c") for number in range(800)]
    for key in (*keys, "q/other", "p/a//odd", "p/m/"):
        world.store.put(key, key.encode())
    names = world.mount()
    walk = await names.walk("data", "p/")
    found: list[Entry] = []
    pages = 0
    while page := await walk.page():
        pages += 1
        found += page
    assert (pages, sorted(entry.key for entry in found)) == (2, sorted(keys))
    assert await walk.page() == []
    lists = world.lists
    entry = await names.resolve("data", "p/b/c/0007")
    assert entry in found
    assert (await names.resolve("data", "p/m")).kind is Kind.DIRECTORY
    assert world.lists == lists, "directories and files are known"


async def test_a_walk_covers_what_a_pin_covers(world: World) -> None:
    for key in ("pre/a", "pre/ab", "pre/d/f", "pre/d/g"):
        world.store.put(key, b"1")
    names = world.mount(prefix="pre/")

    async def walked(prefix: str, *, exact: bool = False) -> list[str]:
        walk = await names.walk("data", prefix, exact=exact)
        return sorted([entry.key for entry in await walk.page()])

    assert await walked("") == await walked("pre/") == await walked("pre") == ["pre/a", "pre/ab", "pre/d/f", "pre/d/g"]
    assert await walked("pre/a") == await walked("pre/a", exact=True) == ["pre/a"]
    assert await walked("pre/d") == await walked("pre/d/") == ["pre/d/f", "pre/d/g"]
    assert await walked("pre/d", exact=True) == []
    assert await walked("pre/none/") == []
    for prefix in ("pre/none", "elsewhere"):
        with pytest.raises(NotFound):
            await walked(prefix)


# -- a cache disk that fails


async def test_case_9_names_go_on_while_the_disk_of_the_index_fails(world: World) -> None:
    for number in range(300):
        world.store.put(f"d/{number:03}", b"1")
    world.store.put("f", b"1")
    names = world.mount()
    old, _ = await names.lookup(ROOT_INODE, b"f")
    assert isinstance(world.index, SickIndex)
    world.index.sick = True
    directory = await names.resolve("data", "d")
    assert len(await names_of(await names.open_directory(directory.inode))) == 300
    world.store.put("f", b"2")
    world.now += TTL_SECONDS
    new, _ = await names.lookup(ROOT_INODE, b"f")
    assert new.version == world.store.ref("f").version
    assert await names.is_current(new)
    assert names.entry(new.inode) == new
    world.store.delete("f")
    world.now += TTL_SECONDS
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INODE, b"f")
    assert not await names.is_current(old)
    world.index.sick = False
    world.store.put("f", b"3")
    await names.refresh("data", "")
    assert (await names.lookup(ROOT_INODE, b"f"))[0].version == world.store.ref("f").version
    assert len(await names_of(await names.open_directory(directory.inode))) == 300
    assert world.index.link(ROOT_INODE, b"f") is not None
