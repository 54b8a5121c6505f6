"""Looking a name up, against a store in memory: what it leads to, what it costs, and which version it is."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.worlds import TTL_SECONDS, SickIndex, World, entries_of, names_of, out_of_order
from tiercache.core import record
from tiercache.core.record import ROOT_INODE, Entry, Inode, Kind
from tiercache.engine import recorder
from tiercache.engine.namespace import NameNotFound
from tiercache.errors import NotFound, Unavailable, VersionChanged
from tiercache.tiers.faulty import failing

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
    assert not names.is_current(old)
    assert names.is_current(new)
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
    assert not names.is_current(new)


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
