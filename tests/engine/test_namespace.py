"""The namespace as a whole, against a store in memory: several datasets, refresh, walks, and a cache disk that fails."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.worlds import TTL_SECONDS, SickIndex, World, entries_of, names_of, out_of_order
from tiercache.core.record import ROOT_INODE, Entry, Kind
from tiercache.engine.dataset import Dataset
from tiercache.errors import NotFound, Unavailable
from tiercache.tiers.faulty import failing
from tiercache.tiers.memory import MemoryCold

# -- several datasets, and other sources


async def test_several_datasets_are_directories_of_the_root(world: World) -> None:
    world.store.put("one/f", b"1")
    world.store.put("two/g", b"2")
    both = [Dataset(name, world.late, world.late, f"{name}/", 60.0) for name in ("one", "two")]
    names = world.mount_all(both)
    entries = await entries_of(await names.open_directory(ROOT_INODE))
    assert [entry.name for entry in entries] == [b"one", b"two"]
    assert [names.entry(entry.inode) for entry in entries] == entries
    assert [names.is_current(entry) for entry in entries] == [True, True]
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
    assert names.is_current(new)
    assert names.entry(new.inode) == new
    world.store.delete("f")
    world.now += TTL_SECONDS
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INODE, b"f")
    assert not names.is_current(old)
    world.index.sick = False
    world.store.put("f", b"3")
    await names.refresh("data", "")
    assert (await names.lookup(ROOT_INODE, b"f"))[0].version == world.store.ref("f").version
    assert len(await names_of(await names.open_directory(directory.inode))) == 300
    assert world.index.link(ROOT_INODE, b"f") is not None
