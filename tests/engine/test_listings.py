"""Listing a directory, against a store in memory: when names come, what a failure leaves, and which names there are."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from trio.testing import wait_all_tasks_blocked

from tests.engine.worlds import TTL_SECONDS, Late, World, entries_of, names_of, out_of_order
from tiercache.core.record import ROOT_INODE, Kind, Page
from tiercache.engine.dataset import Dataset
from tiercache.errors import BadResponse, NotFound, Unavailable
from tiercache.tiers.faulty import failing
from tiercache.tiers.tier import MAX_PAGE

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
    assert not names.is_current(directory)
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
        assert not names.is_current(entry)
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
