"""Open, read and release: which version a reader sees, what it costs the store, and what failures look like."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import CHUNK_BYTES, KIB, MIB, content, engine_on, limits, until
from tests.engine.faults import broken, failing_disk
from tiercache.core.record import Inode
from tiercache.engine.disks import PLACED_LEAST_BYTES
from tiercache.errors import Archived, NotFound, Unavailable, VersionChanged
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.hot import Placed
from tiercache.tiers.memory import MemoryCold

SIZE_BYTES = 3 * MIB
OLD, NEW = content(1, SIZE_BYTES), content(2, SIZE_BYTES)
ONLY = limits(read_ahead_bytes=0)


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    store.put("big", OLD)
    store.put("small", OLD[:5000])
    return store


# -- versions


@pytest.mark.parametrize(("key", "size_bytes"), [("big", SIZE_BYTES), ("small", 5000)])
@pytest.mark.parametrize("grows_bytes", [0, 100, -100])
async def test_case_01_an_overwritten_object_is_found_out_by_open(
    tmp_path: Path, cold: MemoryCold, key: str, size_bytes: int, grows_bytes: int
) -> None:
    """The name is still fresh and nothing of it is hot: open says so instead of letting the first read fail, and the way by which
    the kernel goes on (look up again, open what is found) leads to the new bytes."""
    new = content(2, size_bytes + grows_bytes)
    async with engine_on(tmp_path, cold) as mount:
        old = await mount.entry(key)
        cold.put(key, new)
        mount.clock.pass_seconds(2)
        with pytest.raises(VersionChanged):
            await mount.engine.reader.open(old.inode)
        assert await mount.cat(key) == new


async def test_case_01_old_bytes_are_not_served_after_the_ttl(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, ttl_seconds=60.0) as mount:
        for key, old, new in (("big", OLD, NEW), ("small", OLD[:5000], NEW[:5000])):
            assert await mount.cat(key) == old
            cold.put(key, new)
            assert await mount.cat(key) == old  # hot, and within its time to live
        mount.clock.pass_seconds(61)
        for key, new in (("big", NEW), ("small", NEW[:5000])):
            assert await mount.cat(key) == new


async def test_case_01_old_bytes_are_not_served_after_a_refresh(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, ttl_seconds=1e9) as mount:
        assert await mount.cat("big") == OLD
        cold.put("big", NEW)
        await mount.engine.namespace.refresh("data", "big")
        assert await mount.cat("big") == NEW


async def test_case_01_a_fresh_open_confirms_a_version_that_others_have_open(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=ONLY) as mount, mount.opened("big") as inode:
        assert await mount.read(inode, 0, 4096) == OLD[:4096]
        await mount.settled()
        cold.put("big", NEW)
        mount.clock.pass_seconds(2)
        with pytest.raises(VersionChanged):
            await mount.engine.reader.open(inode)
        assert await mount.cat("big") == NEW
        assert await mount.read(inode, 0, 4096) == OLD[:4096]


async def test_case_02_a_deleted_object_stays_readable_through_an_open_handle(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=ONLY) as mount, mount.opened("big") as inode:
        assert await mount.read(inode, 0, CHUNK_BYTES) == OLD[:CHUNK_BYTES]
        await mount.settled()
        cold.delete("big")
        mount.clock.pass_seconds(61)
        with pytest.raises(NotFound):
            await mount.entry("big")
        assert await mount.read(inode, 0, CHUNK_BYTES) == OLD[:CHUNK_BYTES]
        with pytest.raises(VersionChanged):  # not NotFound: ENOENT is no answer to a read
            await mount.read(inode, CHUNK_BYTES, 4096)


async def test_case_02_open_of_a_name_that_was_deleted_leads_to_not_found(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        for key in ("big", "small"):
            entry = await mount.entry(key)
            cold.delete(key)
            mount.clock.pass_seconds(2)
            with pytest.raises(VersionChanged):
                await mount.engine.reader.open(entry.inode)
            with pytest.raises(NotFound):
                await mount.entry(key)


async def test_case_03_a_read_across_chunks_is_of_one_version_or_an_error(tmp_path: Path, cold: MemoryCold) -> None:
    gate = cold.hold("read", "big", after_bytes=64 * KIB)
    async with engine_on(tmp_path, cold, numbers=ONLY) as mount, mount.opened("big") as inode:
        outcome: list[str] = []

        async def read() -> None:
            with pytest.raises(VersionChanged):
                await mount.read(inode, CHUNK_BYTES // 2, CHUNK_BYTES)
            outcome.append("changed")

        async with trio.open_nursery() as readers:
            readers.start_soon(read)
            await gate.reached.wait()
            cold.put("big", NEW)
            gate.release()
        assert outcome == ["changed"]
        assert await mount.cat("big") == NEW


async def test_case_03_a_read_that_finds_the_version_gone_leads_the_next_open_to_the_new_one(
    tmp_path: Path, cold: MemoryCold
) -> None:
    async with engine_on(tmp_path, cold, ttl_seconds=1e9, numbers=ONLY) as mount, mount.opened("big") as inode:
        assert await mount.read(inode, 0, 4096) == OLD[:4096]
        cold.put("big", NEW)
        for _ in range(3):
            with pytest.raises(VersionChanged):
                await mount.read(inode, 2 * MIB, 4096)
        assert cold.requests["list"] <= 3
        assert await mount.cat("big") == NEW


async def test_case_04_versions_have_inodes_of_their_own(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        inode = await mount.open("big")
        assert await mount.read(inode, 0, SIZE_BYTES) == OLD
        cold.put("big", NEW)
        mount.clock.pass_seconds(61)
        async with mount.opened("big") as other:
            assert other != inode
            assert await mount.read(other, 0, SIZE_BYTES) == NEW
            assert await mount.read(inode, 0, SIZE_BYTES) == OLD
        mount.release(inode)
        with pytest.raises(VersionChanged):
            await mount.engine.reader.open(inode)


async def test_case_22_times_and_numbers_do_not_change_because_something_was_cached(tmp_path: Path, cold: MemoryCold) -> None:
    cold.put("dir/file", OLD, mtime_seconds=1234)
    async with engine_on(tmp_path, cold) as mount:
        before = await mount.entry("dir/file")
        assert await mount.cat("dir/file") == OLD
        await mount.settled()
        mount.clock.pass_seconds(3600)
        assert await mount.entry("dir/file") == before
        await mount.engine.holdings.evict([before.object_id])
        assert await mount.entry("dir/file") == before


# -- handles


async def test_a_handle_is_open_as_often_as_it_was_opened(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        inode = await mount.open("big")
        assert await mount.open("big") == inode
        mount.release(inode)
        assert mount.engine.reader.open_count == 1
        assert await mount.read(inode, 0, 4096) == OLD[:4096]
        mount.release(inode)
        assert mount.engine.reader.open_count == 0
        mount.release(inode)
        await mount.settled()
        assert not mount.engine.holdings.in_use(cold.ref("big").object_id)


async def test_an_open_that_fails_or_is_interrupted_leaves_no_user(tmp_path: Path, cold: MemoryCold) -> None:
    faults = Script(Fault("read", "small", error=lambda: Unavailable("gone")))
    async with engine_on(tmp_path, Faulty(cold, faults)) as mount:
        with pytest.raises(Unavailable):
            await mount.open("small")
        gate = cold.hold("read", "small")
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mount.open, "small")
                await gate.reached.wait()
                scope.cancel()
        gate.release()
        await mount.settled()
        assert mount.engine.reader.open_count == 0
        assert not mount.engine.holdings.in_use(cold.ref("small").object_id)
        assert await mount.cat("small") == OLD[:5000]


async def test_an_unknown_inode_is_answered_with_look_again(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        with pytest.raises(VersionChanged):
            await mount.engine.reader.open(Inode(12345))
        with pytest.raises(VersionChanged):
            await mount.read(Inode(12345), 0, 10)


# -- failures of the store and of the disk


async def test_case_10_hot_data_is_served_while_the_store_is_away(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        for key in ("big", "small"):
            await mount.cat(key)
        cold.put("later", NEW)
        await mount.settled()
        await cold.aclose()
        mount.clock.pass_seconds(10)
        assert await mount.cat("big") == OLD
        assert await mount.cat("small") == OLD[:5000]


async def test_case_10_a_partly_hot_file_serves_what_it_has(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=ONLY) as mount:
        async with mount.opened("big") as inode:
            await mount.read(inode, 0, 4096)
        await mount.settled()
        mount.clock.pass_seconds(10)
        await cold.aclose()
        async with mount.opened("big") as inode:
            assert await mount.read(inode, 0, CHUNK_BYTES) == OLD[:CHUNK_BYTES]
            with pytest.raises(Unavailable):
                await mount.read(inode, CHUNK_BYTES, 1)


async def test_bytes_that_lie_in_one_hot_file_may_be_left_there(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=ONLY) as mount, mount.opened("big") as inode:
        find = mount.engine.reader.find
        for _ in range(2):  # while the chunk is fetched, and when it is there
            found = await find(inode, 100, PLACED_LEAST_BYTES)
            assert isinstance(found, Placed)
            assert (found.offset, len(found)) == (100, PLACED_LEAST_BYTES)
            assert os.pread(found.file.fd, len(found), found.offset) == OLD[100 : 100 + PLACED_LEAST_BYTES]
            await mount.settled()
        assert await find(inode, 100, 4096) == OLD[100:4196]
        begin = CHUNK_BYTES - PLACED_LEAST_BYTES
        assert await find(inode, begin, 2 * PLACED_LEAST_BYTES) == OLD[begin : begin + 2 * PLACED_LEAST_BYTES]


async def test_case_09_a_disk_that_fails_reads_costs_the_reader_a_detour(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, cold, files=disk) as mount, mount.opened("big") as inode:
        assert await mount.read(inode, 0, SIZE_BYTES) == OLD
        await mount.settled()
        disk.reading = broken
        assert await mount.read(inode, 1000, 4096) == OLD[1000:5096]
        assert mount.counted("tiercache_streamed_bytes_total", "data", "sick") == 4096
        disk.reading = None
        cold.requests.clear()
        assert await mount.read(inode, 1000, 4096) == OLD[1000:5096]
        assert cold.requests["read"] == 0


async def test_case_17_an_archived_object_says_what_to_do_and_is_readable_when_restored(tmp_path: Path, cold: MemoryCold) -> None:
    cold.put("big", OLD, archived=True)
    cold.put("small", OLD[:5000], archived=True)
    async with engine_on(tmp_path, cold) as mount:
        for key in ("big", "small"):
            with pytest.raises(Archived, match=key) as caught:
                await mount.open(key)
            assert "restore" in caught.value.hint
        cold.put("big", OLD)
        cold.put("small", OLD[:5000])
        mount.clock.pass_seconds(61)
        assert await mount.cat("big") == OLD
        assert await mount.cat("small") == OLD[:5000]


# -- how much is fetched


async def test_case_14_read_ahead_of_many_handles_stays_within_one_budget(tmp_path: Path, cold: MemoryCold) -> None:
    keys = [f"many{number:02}" for number in range(20)]
    for key in keys:
        cold.put(key, OLD)
    numbers = limits(read_ahead_bytes=4 * MIB, whole_file_bytes=0)
    async with engine_on(tmp_path, cold, numbers=numbers) as mount:
        inodes = [await mount.open(key) for key in keys]
        for offset in range(0, 256 * KIB, 64 * KIB):
            for inode in inodes:
                assert await mount.read(inode, offset, 64 * KIB) == OLD[offset : offset + 64 * KIB]
        cold.hold("read")
        for offset in range(256 * KIB, 512 * KIB, 64 * KIB):
            with trio.move_on_after(0.02):
                async with trio.open_nursery() as readers:
                    for inode in inodes:
                        readers.start_soon(mount.read, inode, offset, 64 * KIB)
        await wait_all_tasks_blocked()
        assert mount.engine.reader._budget.used_bytes <= 4 * MIB
        assert mount.engine.filler.running_count * CHUNK_BYTES <= 4 * MIB + len(inodes) * CHUNK_BYTES


async def test_read_ahead_gives_its_budget_back(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        assert await mount.cat("big", 64 * KIB) == OLD
        await mount.settled()
        await until(lambda: mount.engine.reader._budget.used_bytes == 0)


async def test_case_18_interleaved_streams_of_one_handle_read_ahead_each(tmp_path: Path, cold: MemoryCold) -> None:
    """Two workers share a file after a fork: their reads alternate, and each has its chunks before it comes to them."""
    cold.put("huge", OLD * 8)
    async with engine_on(tmp_path, cold, numbers=limits(whole_file_bytes=0)) as mount, mount.opened("huge") as inode:
        late = 0
        for step in range(0, 4 * MIB, 64 * KIB):
            for start in (0, 12 * MIB):
                offset = start + step
                chunk = offset // CHUNK_BYTES
                held = mount.engine.holdings.held(cold.ref("huge").object_id)
                assert held is not None
                if step >= MIB and not held.has(chunk) and mount.engine.filler.running(held.ref.object_id, chunk) is None:
                    late += 1
                assert await mount.read(inode, offset, 64 * KIB) == (OLD * 8)[offset : offset + 64 * KIB]
        assert late == 0
        await mount.settled()
        assert cold.sent_bytes <= 2 * (4 * MIB + 16 * CHUNK_BYTES)


async def test_case_21_random_small_reads_of_a_huge_file_do_not_download_it_over_and_over(
    tmp_path: Path, cold: MemoryCold
) -> None:
    """Random 4 KiB reads of an object much larger than the cache: transferred is about what was read."""
    size_bytes = 32 * MIB
    data = content(3, size_bytes)
    cold.put("huge", data)
    rng = random.Random(5)
    numbers = limits(whole_file_bytes=MIB)
    async with engine_on(tmp_path, cold, capacity_bytes=2 * MIB, numbers=numbers) as mount, mount.opened("huge") as inode:
        read_bytes = 0
        for _ in range(600):
            offset = rng.randrange(size_bytes // 4096) * 4096
            assert await mount.read(inode, offset, 4096) == data[offset : offset + 4096]
            read_bytes += 4096
        await mount.settled()
        assert cold.sent_bytes <= size_bytes + 2 * read_bytes


async def test_case_21_one_small_read_of_a_large_object_stays_small(tmp_path: Path, cold: MemoryCold) -> None:
    cold.put("huge", OLD * 8)
    async with engine_on(tmp_path, cold, numbers=limits(whole_file_bytes=MIB)) as mount, mount.opened("huge") as inode:
        assert await mount.read(inode, 5 * MIB + 123, 1000) == (OLD * 8)[5 * MIB + 123 : 5 * MIB + 1123]
        await mount.settled()
        assert cold.sent_bytes <= 8192


async def test_a_sequential_read_costs_the_store_each_byte_once(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=limits(whole_file_bytes=0)) as mount:
        assert await mount.cat("big", 100_000) == OLD
        await mount.settled()
        assert cold.sent_bytes == SIZE_BYTES
        assert mount.counted("tiercache_opens_total", "data") == 1
