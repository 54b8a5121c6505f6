"""Holdings: index, hot files and ledger change together, whatever the order in which they get to know of each other's changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import (
    CHUNK_BYTES,
    KIB,
    MIB,
    Clock,
    Lagging,
    Mounted,
    content,
    engine_on,
    hot_tier,
    limits,
    occupied_bytes,
    until,
)
from tests.engine.faults import broken, failing_disk
from tiercache.core.record import ObjectRef
from tiercache.engine import holdings
from tiercache.errors import HotFull, HotSick, Unavailable
from tiercache.index.lmdb import open_index
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.memory import MemoryCold

SIZE_BYTES = 3 * MIB
DATA = content(1, SIZE_BYTES)
ONLY = limits(read_ahead_bytes=0)


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    store.put("big", DATA)
    return store


def put_many(cold: MemoryCold, count: int, size_bytes: int = CHUNK_BYTES) -> dict[str, bytes]:
    files = {f"f{number:03}": content(100 + number, size_bytes) for number in range(count)}
    for key, data in files.items():
        cold.put(key, data)
    return files


async def fill(mount: Mounted, key: str, chunk: int) -> None:
    async with mount.opened(key) as inode:
        begin = chunk * CHUNK_BYTES
        assert await mount.read(inode, begin, 4096) == DATA[begin : begin + 4096]
        await until(lambda: mount.engine.filler.running_count == 0)


# -- the index is behind


async def test_a_file_that_is_opened_again_before_the_index_knows_it_keeps_its_chunks(tmp_path: Path, cold: MemoryCold) -> None:
    """The record is not committed yet when the next user comes: making the file anew would leave the first chunk, which the
    index is about to hear of, as a hole of zeros."""
    index = Lagging(MemoryIndex())
    index.lagging = True
    async with engine_on(tmp_path, cold, index=index, numbers=ONLY) as mount:
        await fill(mount, "big", 0)
        await fill(mount, "big", 8)
        assert cold.sent_bytes == 2 * CHUNK_BYTES
        await mount.settled()
        assert set(index.chunks(cold.ref("big").object_id)) == {0, 8}
        assert mount.ledger.held_bytes == index.held_bytes(0) == 2 * CHUNK_BYTES
        await fill(mount, "big", 0)
        assert cold.sent_bytes == 2 * CHUNK_BYTES


async def test_opening_again_at_once_on_the_index_on_disk(tmp_path: Path, cold: MemoryCold) -> None:
    index = await open_index(tmp_path / "index", boot_id="boot", exists=lambda record: True)
    files = put_many(cold, 20, 5000)
    async with engine_on(tmp_path, cold, index=index) as mount:
        for _ in range(3):
            for key, data in files.items():
                assert await mount.cat(key) == data
        assert cold.requests["read"] == len(files)
        await mount.settled()
        assert mount.ledger.held_bytes == index.held_bytes(0)
    await index.aclose(clean=True)


async def test_nobody_is_forgotten_before_the_index_knows_and_nobody_stays_after(tmp_path: Path, cold: MemoryCold) -> None:
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, index=index, numbers=ONLY) as mount:
        object_id = cold.ref("big").object_id
        for chunk in range(4):
            await fill(mount, "big", chunk)
        await until(lambda: mount.engine.holdings.held(object_id) is None)
        assert not mount.engine.holdings.in_use(object_id)


async def test_changes_that_the_index_lost_do_not_leave_space_that_nobody_owns(tmp_path: Path, cold: MemoryCold) -> None:
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, index=index, numbers=ONLY) as mount:
        await mount.entry("big")
        index.failing = lambda: HotSick("the index's disk is full")
        async with mount.opened("big") as inode:
            assert await mount.read(inode, 0, 4096) == DATA[:4096]
            await until(lambda: mount.engine.filler.running_count == 0)
            index.failing = None
        await until(lambda: mount.ledger.held_bytes == 0)
        assert occupied_bytes(mount.files) == 0
        await fill(mount, "big", 0)
        await mount.settled()
        assert mount.ledger.held_bytes == index.held_bytes(0) == CHUNK_BYTES
        # one more chunk is lost, of a record that is there: its blocks stay accounted until the file goes
        index.failing = lambda: HotSick("the index's disk is full")
        await fill(mount, "big", 1)
        object_id = cold.ref("big").object_id
        await until(lambda: mount.engine.holdings.held(object_id) is None)
        index.failing = None
        assert mount.ledger.held_bytes == 2 * CHUNK_BYTES >= occupied_bytes(mount.files)
        assert await mount.engine.holdings.evict([object_id]) == 1
        assert mount.ledger.held_bytes == occupied_bytes(mount.files) == 0


async def test_changes_that_were_lost_while_it_was_opened_again_are_found_out_at_its_end(
    tmp_path: Path, cold: MemoryCold
) -> None:
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, index=index, numbers=ONLY) as mount:
        await mount.entry("big")
        index.failing = lambda: HotSick("the index's disk is full")
        await fill(mount, "big", 0)
        async with mount.opened("big"):  # before the first user's changes are known to be lost
            await wait_all_tasks_blocked(0.05)
            index.failing = None
        await until(lambda: mount.ledger.held_bytes == 0)
        assert occupied_bytes(mount.files) == 0


async def test_what_is_dropped_while_nobody_uses_it_is_let_go_as_well(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    monkeypatch.setattr(holdings, "RETIRE_SECONDS", 0.05)
    async with engine_on(tmp_path, cold, files=disk, numbers=ONLY) as mount:
        await fill(mount, "big", 0)
        object_id = cold.ref("big").object_id
        held = mount.engine.holdings.held(object_id)
        assert held is not None
        assert held.users == 0
        disk.syncing = broken
        await mount.engine.holdings.sync(0)
        await until(lambda: mount.engine.holdings.held(object_id) is None and mount.ledger.held_bytes == 0)
        assert mount.engine.index.hot(object_id) is None


async def test_a_chunk_that_was_dropped_and_filled_again_counts_once(tmp_path: Path, cold: MemoryCold) -> None:
    """The index never hears of the drop, and adds the chunk a second time."""
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, index=index, numbers=ONLY) as mount:
        async with mount.opened("big") as inode:
            assert await mount.read(inode, 0, 2 * CHUNK_BYTES) == DATA[: 2 * CHUNK_BYTES]
            await until(lambda: mount.engine.filler.running_count == 0)
            held = mount.engine.holdings.held(cold.ref("big").object_id)
            assert held is not None
            index.failing = lambda: HotSick("the index's disk is full")
            mount.engine.holdings.drop_chunk(held, 0)
            index.failing = None
            assert await mount.read(inode, 0, 4096) == DATA[:4096]
            await until(lambda: mount.engine.filler.running_count == 0)
        await mount.settled()
        assert mount.ledger.held_bytes == index.held_bytes(0) == 2 * CHUNK_BYTES
        await mount.engine.holdings.evict([cold.ref("big").object_id])
        assert mount.ledger.held_bytes == index.held_bytes(0) == 0


async def test_a_copy_whose_record_lost_a_chunk_is_not_called_complete(tmp_path: Path, cold: MemoryCold) -> None:
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, index=index, numbers=ONLY) as mount:
        async with mount.opened("big") as inode:
            assert await mount.read(inode, 0, SIZE_BYTES // 2) == DATA[: SIZE_BYTES // 2]
            await until(lambda: mount.engine.filler.running_count == 0)
            index.failing = lambda: HotSick("the index's disk is full")
            assert await mount.read(inode, SIZE_BYTES // 2, CHUNK_BYTES) == DATA[SIZE_BYTES // 2 :][:CHUNK_BYTES]
            await until(lambda: mount.engine.filler.running_count == 0)
            index.failing = None
            assert await mount.read(inode, 0, SIZE_BYTES) == DATA
            await until(lambda: mount.engine.filler.running_count == 0)
            entry = mount.engine.namespace.entry(inode)
            assert entry is not None
            assert mount.engine.facts.residency(entry) == "hot(11/12),cold"
            assert mount.engine.facts.checksum(entry) == ""
        await mount.settled()
        record = index.hot(cold.ref("big").object_id)
        assert record is not None
        assert not record.complete
        assert mount.ledger.held_bytes == SIZE_BYTES
        assert await mount.cat("big") == DATA


async def test_a_sick_index_costs_the_reader_nothing_but_the_cache(tmp_path: Path, cold: MemoryCold) -> None:
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, index=index, capacity_bytes=4 * CHUNK_BYTES) as mount:
        await mount.entry("big")
        index.failing = lambda: HotSick("the index's disk is broken")
        for _ in range(2):
            assert await mount.cat("big") == DATA
        assert mount.ledger.reserved_bytes == 0


# -- loading


async def test_a_cancelled_opener_does_not_spoil_the_copy_for_the_next(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, cold, files=disk, numbers=ONLY) as mount:
        assert await mount.cat("big") == DATA
        await mount.settled()
        ref = cold.ref("big")
        await until(lambda: mount.engine.holdings.held(ref.object_id) is None)
        cold.requests.clear()
        disk.hold = True
        got: list[bytes] = []

        async def second() -> None:
            got.append(await mount.cat("big"))

        async with trio.open_nursery() as openers:
            first = trio.CancelScope()

            async def interrupted() -> None:
                with first:
                    await mount.engine.holdings.acquire(ref)

            openers.start_soon(interrupted)
            await until(lambda: mount.engine.holdings.held(ref.object_id) is not None)
            openers.start_soon(second)
            await wait_all_tasks_blocked()
            first.cancel()
            await until(lambda: first.cancelled_caught)
            disk.hold = False
            disk.go_on.set()
        assert got == [DATA]
        assert cold.requests["read"] == 0


async def test_case_09_a_disk_that_hangs_is_passed_by_and_found_hot_again(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, cold, files=disk, numbers=ONLY) as mount:
        disks = mount.engine.holdings.disks
        assert await mount.cat("big") == DATA
        await mount.settled()
        await until(lambda: mount.engine.holdings.held(cold.ref("big").object_id) is None)
        disks.deadline_seconds = 0.1
        disk.hold = True
        try:
            inode = await mount.open("big")  # its hot copy cannot be looked at
            assert disks.is_hung(0)
            with trio.fail_after(5):  # and nobody waits for the disk a second time
                for offset in range(0, SIZE_BYTES, CHUNK_BYTES):
                    assert await mount.read(inode, offset, 4096) == DATA[offset : offset + 4096]
        finally:
            disk.hold = False
            disk.go_on.set()
        mount.clock.pass_seconds(11)
        disks.deadline_seconds = 10.0
        cold.requests.clear()
        mount.engine.filler._kept.clear()
        for offset in range(0, SIZE_BYTES, CHUNK_BYTES):
            assert await mount.read(inode, offset, CHUNK_BYTES) == DATA[offset : offset + CHUNK_BYTES]
        mount.release(inode)
        assert cold.requests["read"] == 0
        assert mount.ledger.held_bytes == mount.engine.index.held_bytes(0) == SIZE_BYTES


async def test_case_09_operations_that_queue_are_not_taken_for_a_hang(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        disks = mount.engine.holdings.disks
        disks.deadline_seconds = 0.5
        order = trio.CapacityLimiter(1)
        assert order.total_tokens == 1
        done: list[int] = []

        async def slow() -> None:
            done.append(await disks.run(0, lambda: sum(range(200_000))))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(300):
                    nursery.start_soon(slow)
        assert len(done) == 300
        assert not disks.is_hung(0)


async def test_a_file_that_is_gone_or_shortened_is_fetched_again(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        for spoil in (Path.unlink, lambda path: path.write_bytes(b"short")):
            assert await mount.cat("big") == DATA
            await mount.settled()
            (path,) = [path for path in (tmp_path / "hot0").rglob("*") if path.is_file()]
            spoil(path)
            assert await mount.cat("big") == DATA
            await mount.settled()
            assert mount.ledger.held_bytes == mount.engine.index.held_bytes(0) == occupied_bytes(mount.files) == SIZE_BYTES


async def test_another_chunk_size_in_the_configuration_does_not_move_chunks(tmp_path: Path, cold: MemoryCold) -> None:
    index, files = MemoryIndex(), hot_tier(tmp_path)
    async with engine_on(tmp_path, cold, index=index, files=files, numbers=ONLY) as mount:
        await fill(mount, "big", 5)
        await mount.settled()
    async with engine_on(tmp_path, cold, index=index, files=files, numbers=limits(512 * KIB, read_ahead_bytes=0)) as mount:
        cold.sent_bytes = 0
        assert await mount.cat("big") == DATA
        await mount.settled()
        assert cold.sent_bytes == SIZE_BYTES - CHUNK_BYTES


# -- verification after another boot


async def damaged_after_reboot(tmp_path: Path, cold: MemoryCold, offset: int) -> tuple[MemoryIndex, ObjectRef]:
    index, ref = MemoryIndex(), cold.ref("big")
    async with engine_on(tmp_path, cold, index=index) as mount:
        assert await mount.cat("big") == DATA
        await mount.settled()
    (path,) = [path for path in (tmp_path / "hot0").rglob("*") if path.is_file()]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(4096))
    return index, ref


async def test_chunks_of_another_boot_are_verified_and_damaged_ones_fetched_again(tmp_path: Path, cold: MemoryCold) -> None:
    index, ref = await damaged_after_reboot(tmp_path, cold, 5 * CHUNK_BYTES + 8192)
    cold.sent_bytes = 0
    index = index.reopened(other_boot=True)
    async with engine_on(tmp_path, cold, index=index) as mount:
        assert await mount.cat("big") == DATA
        await mount.settled()
        assert cold.sent_bytes == CHUNK_BYTES
        assert mount.counted("tiercache_verify_failures_total") == 1
        assert {record.epoch for record in index.chunks(ref.object_id).values()} == {index.health.epoch}
        assert mount.ledger.held_bytes == index.held_bytes(0) == SIZE_BYTES
        assert await mount.cat("big") == DATA
        assert cold.sent_bytes == CHUNK_BYTES


async def test_a_damaged_chunk_is_not_served_while_the_store_is_away(tmp_path: Path, cold: MemoryCold) -> None:
    index, _ = await damaged_after_reboot(tmp_path, cold, 5 * CHUNK_BYTES + 8192)
    async with engine_on(tmp_path, cold, index=index.reopened(other_boot=True)) as mount, mount.opened("big") as inode:
        await cold.aclose()
        assert await mount.read(inode, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
        with pytest.raises(Unavailable):
            await mount.read(inode, 5 * CHUNK_BYTES, 4096)


async def test_many_readers_of_an_unverified_chunk_have_it_hashed_once(tmp_path: Path, cold: MemoryCold) -> None:
    index, _ = await damaged_after_reboot(tmp_path, cold, 5 * CHUNK_BYTES)
    cold.sent_bytes = 0
    async with engine_on(tmp_path, cold, index=index.reopened(other_boot=True), numbers=ONLY) as mount:
        async with mount.opened("big") as inode:

            async def read() -> None:
                assert await mount.read(inode, 5 * CHUNK_BYTES, 4096) == DATA[5 * CHUNK_BYTES : 5 * CHUNK_BYTES + 4096]

            async with trio.open_nursery() as readers:
                for _ in range(8):
                    readers.start_soon(read)
        await mount.settled()
        assert mount.counted("tiercache_verify_failures_total") == 1
        assert cold.sent_bytes == CHUNK_BYTES


# -- room


async def test_case_06_the_cache_stays_below_its_limit_under_load(tmp_path: Path, cold: MemoryCold) -> None:
    files = put_many(cold, 40)
    clock = Clock()
    capacity_bytes = 10 * CHUNK_BYTES
    async with engine_on(tmp_path, cold, capacity_bytes=capacity_bytes, clock=clock) as mount:

        async def reader(keys: list[str]) -> None:
            for key in keys:
                assert await mount.cat(key) == files[key]
                clock.pass_seconds(1)
                assert mount.ledger.used_bytes <= capacity_bytes
                assert occupied_bytes(mount.files) <= capacity_bytes

        async with trio.open_nursery() as readers:
            for start in range(4):
                readers.start_soon(reader, list(files)[start:] + list(files)[:start])
        await mount.settled()
        assert mount.ledger.held_bytes == mount.engine.index.held_bytes(0) == occupied_bytes(mount.files)
        assert mount.counted("tiercache_evictions_total") > 0


async def test_case_07_fresh_objects_are_not_evicted_for_each_other(tmp_path: Path, cold: MemoryCold) -> None:
    files = put_many(cold, 6)
    async with engine_on(tmp_path, cold, capacity_bytes=3 * CHUNK_BYTES) as mount:
        for key, data in files.items():  # the clock stands still: all are fresh
            assert await mount.cat(key) == data
        await mount.settled()
        assert mount.engine.index.hot_count() == 3
        assert mount.counted("tiercache_evictions_total") == 0


async def test_an_object_with_users_is_never_evicted(tmp_path: Path, cold: MemoryCold) -> None:
    files = put_many(cold, 8)
    async with engine_on(tmp_path, cold, capacity_bytes=3 * CHUNK_BYTES) as mount, mount.opened("f000") as inode:
        for key, data in files.items():
            assert await mount.cat(key) == data
            mount.clock.pass_seconds(60)
        assert mount.engine.index.hot(cold.ref("f000").object_id) is not None
        cold.requests.clear()
        assert await mount.read(inode, 0, CHUNK_BYTES) == files["f000"]
        assert cold.requests["read"] == 0


async def test_nobody_opens_a_file_that_is_being_removed(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        for _ in range(20):
            assert await mount.cat("big") == DATA
            await mount.settled()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mount.engine.holdings.evict, [cold.ref("big").object_id])
                nursery.start_soon(mount.cat, "big")
        await mount.settled()
        assert mount.ledger.held_bytes == mount.engine.index.held_bytes(0) == occupied_bytes(mount.files) == SIZE_BYTES


async def test_nothing_is_evicted_for_what_can_never_fit(tmp_path: Path, cold: MemoryCold) -> None:
    files = put_many(cold, 4, 4096)
    async with engine_on(tmp_path, cold, capacity_bytes=CHUNK_BYTES // 2) as mount:
        for key, data in files.items():
            assert await mount.cat(key) == data
        mount.clock.pass_seconds(60)
        assert await mount.cat("big") == DATA
        await mount.settled()
        assert mount.engine.index.hot_count() == 4


async def test_a_file_that_cannot_be_removed_stays_accounted(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, cold, files=disk) as mount:
        assert await mount.cat("big") == DATA
        await mount.settled()
        disk.unlinking = broken
        assert await mount.engine.holdings.evict([cold.ref("big").object_id]) == 1
        assert mount.ledger.held_bytes == occupied_bytes(mount.files) == SIZE_BYTES
        assert mount.engine.holdings.has_residue
        disk.unlinking = None
        assert await mount.engine.holdings.sweep(0) == 1
        assert mount.ledger.held_bytes == occupied_bytes(mount.files) == 0
        assert not mount.engine.holdings.has_residue


async def test_two_directories_share_the_load_and_one_may_be_sick(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = put_many(cold, 8)
    cold.put("new", DATA[:CHUNK_BYTES])
    disk = failing_disk(tmp_path, monkeypatch, count=2)
    async with engine_on(tmp_path, cold, files=disk) as mount:
        for key, data in files.items():
            assert await mount.cat(key) == data
        await mount.settled()
        assert [mount.engine.index.held_bytes(directory) for directory in (0, 1)] == [4 * CHUNK_BYTES] * 2
        mount.engine.holdings.disks.failed(1, HotSick("it failed"))
        assert await mount.cat("new") == DATA[:CHUNK_BYTES]
        await mount.settled()
        assert mount.engine.index.held_bytes(0) == 5 * CHUNK_BYTES
        cold.requests.clear()
        for key, data in files.items():  # what lies on the sick one is still read
            assert await mount.cat(key) == data
        assert cold.requests["read"] == 0


# -- what the disk lost, what a crash left


async def test_what_was_lost_in_write_back_is_dropped_and_fetched_again(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.put("other", DATA[:CHUNK_BYTES])
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, cold, files=disk) as mount, mount.opened("big") as inode:
        assert await mount.read(inode, 0, SIZE_BYTES) == DATA
        await mount.settled()
        await mount.engine.holdings.sync(0)
        assert await mount.cat("other") == DATA[:CHUNK_BYTES]
        await mount.settled()
        disk.syncing = broken
        await mount.engine.holdings.sync(0)
        assert mount.engine.index.hot(cold.ref("other").object_id) is None
        assert len(mount.engine.index.chunks(cold.ref("big").object_id)) == 12  # they had been synced before
        disk.syncing = None
        mount.clock.pass_seconds(11)
        cold.requests.clear()
        assert await mount.cat("other") == DATA[:CHUNK_BYTES]
        assert cold.requests["read"] == 1


async def test_what_was_lost_is_not_served_even_if_the_index_cannot_forget_it(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One disk holds the hot files and the index: when it loses bytes, the record that says so may be lost as well."""
    disk = failing_disk(tmp_path, monkeypatch)
    index = Lagging(MemoryIndex())
    cold.put("other", DATA[:CHUNK_BYTES])
    async with engine_on(tmp_path, cold, files=disk, index=index) as mount:
        inode = await mount.open("big")
        assert await mount.read(inode, 0, SIZE_BYTES) == DATA
        assert await mount.cat("other") == DATA[:CHUNK_BYTES]
        await mount.settled()
        await until(lambda: mount.engine.holdings.held(cold.ref("other").object_id) is None)
        disk.syncing = broken
        index.failing = lambda: HotSick("the index's disk is broken")
        with pytest.raises(HotSick):
            await mount.engine.holdings.sync(0)
        mount.release(inode)
        await until(lambda: mount.engine.holdings.held(cold.ref("big").object_id) is None)
        for path in (path for path in (tmp_path / "hot0").rglob("*") if path.is_file()):
            path.write_bytes(bytes(path.stat().st_size))  # what the disk has instead
        disk.syncing, index.failing = None, None
        assert mount.engine.holdings.has_residue
        for key, data in {"big": DATA, "other": DATA[:CHUNK_BYTES]}.items():
            assert await mount.cat(key) == data
        mount.clock.pass_seconds(11)
        for key, data in {"big": DATA, "other": DATA[:CHUNK_BYTES]}.items():
            assert await mount.cat(key) == data
        await mount.settled()
        await until(lambda: not mount.engine.holdings.has_residue)
        assert mount.ledger.held_bytes == index.held_bytes(0)


async def test_the_sweep_removes_what_a_crash_left_and_nothing_else(tmp_path: Path, cold: MemoryCold) -> None:
    index = Lagging(MemoryIndex())
    files = hot_tier(tmp_path)
    cold.put("kept", DATA[:CHUNK_BYTES])
    cold.put("begun", DATA[: MIB + MIB])
    cold.put("stray", DATA[: MIB + MIB + 1])
    async with engine_on(tmp_path, cold, index=index, files=files, numbers=ONLY) as mount:
        assert await mount.cat("kept") == DATA[:CHUNK_BYTES]
        await fill(mount, "big", 0)
        await mount.settled()
        gate = cold.hold("read", after_bytes=64 * KIB)
        for key, first in (("big", 4), ("begun", 0), ("stray", 0)):  # fills that the crash interrupts
            if key == "stray":
                index.lagging = True
            inode = await mount.open(key)
            begin = first * CHUNK_BYTES
            assert await mount.read(inode, begin, 4096) == DATA[begin : begin + 4096]
        index.lose()
        assert gate.reached.is_set()
    gate.release()
    assert len(list(files.walk(0))) == 4
    async with engine_on(tmp_path, cold, index=index.index, files=files) as mount:
        assert await mount.engine.holdings.sweep(0) == 2
        assert index.index.hot_count() == 2
        assert mount.ledger.held_bytes >= occupied_bytes(files) > 2 * CHUNK_BYTES
        cold.sent_bytes = 0
        assert await mount.cat("kept") == DATA[:CHUNK_BYTES]
        assert cold.sent_bytes == 0
        assert await mount.cat("big") == DATA
        await mount.settled()
        assert cold.sent_bytes == SIZE_BYTES - CHUNK_BYTES
        await until(lambda: not mount.engine.holdings.in_use(cold.ref("big").object_id))
        await mount.engine.holdings.evict([cold.ref("big").object_id, cold.ref("kept").object_id])
        assert mount.ledger.held_bytes == occupied_bytes(files) == 0


async def test_the_sweep_leaves_alone_what_is_in_use(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=ONLY) as mount, mount.opened("big") as inode:
        assert await mount.read(inode, 0, 4096) == DATA[:4096]
        await mount.settled()
        assert await mount.engine.holdings.sweep(0) == 0
        assert await mount.engine.holdings.sweep(0) == 0
        assert mount.ledger.held_bytes == CHUNK_BYTES


async def test_reserve_says_what_lacks(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=CHUNK_BYTES // 2) as mount:
        held = await mount.engine.holdings.acquire(cold.ref("big"))
        await mount.engine.holdings.begin(held)
        with pytest.raises(HotFull, match="an object may take"):
            await mount.engine.holdings.reserve(held, 0)
        mount.engine.holdings.release(held)
        await until(lambda: not mount.engine.holdings.in_use(cold.ref("big").object_id))
        assert mount.engine.index.hot_count() == 0
