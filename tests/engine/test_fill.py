"""Filling: each byte is fetched once, handed out as soon as it is there, and never a wrong one, whatever fails on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import CHUNK_BYTES, KIB, MIB, Mounted, content, engine_on, limits, occupied_bytes, until
from tests.engine.faults import broken, failing_disk, no_space
from tiercache.errors import BadResponse, TierError, Unavailable, VersionChanged
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.memory import MemoryCold

SIZE_BYTES = 3 * MIB + 5000
DATA = content(1, SIZE_BYTES)
FULL = limits(read_ahead_bytes=0)


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    store.put("big", DATA)
    store.put("small", DATA[: 100 * KIB])
    return store


def assert_settled(mount: Mounted) -> None:
    """Nothing is promised, nothing runs, and the ledger says what the index and the files say."""
    holdings = mount.engine.holdings
    assert mount.engine.filler.running_count == 0
    assert mount.ledger.reserved_bytes == 0
    assert mount.ledger.held_bytes >= occupied_bytes(mount.files)
    assert mount.ledger.held_bytes >= mount.engine.index.held_bytes(0)
    if not holdings.has_residue:
        assert mount.ledger.held_bytes == mount.engine.index.held_bytes(0)


async def test_readers_at_the_same_time_cause_each_byte_to_be_fetched_once(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:

        async def read_all() -> None:
            assert await mount.cat("big") == DATA

        async with trio.open_nursery() as readers:
            for _ in range(8):
                readers.start_soon(read_all)
        assert cold.sent_bytes == SIZE_BYTES
        await mount.settled()
        assert_settled(mount)
        assert await mount.cat("big") == DATA
        assert cold.sent_bytes == SIZE_BYTES


async def test_readers_of_different_places_share_the_fills(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount, mount.opened("big") as inode:

        async def read_from(start: int) -> None:
            for offset in range(start, SIZE_BYTES, 100 * KIB):
                assert await mount.read(inode, offset, 70 * KIB) == DATA[offset : offset + 70 * KIB]

        async with trio.open_nursery() as readers:
            for start in (0, 50_000, 1_000_000, 2_500_000, 3_000_000):
                readers.start_soon(read_from, start)
        await mount.settled()
        assert cold.sent_bytes <= 1.05 * SIZE_BYTES


async def test_a_caller_is_answered_before_its_chunk_is_complete(tmp_path: Path, cold: MemoryCold) -> None:
    gate = cold.hold("read", "big", after_bytes=128 * KIB)
    async with engine_on(tmp_path, cold, numbers=FULL) as mount, mount.opened("big") as inode:
        with trio.fail_after(5):
            assert await mount.read(inode, 4096, 4096) == DATA[4096:8192]
        assert mount.engine.filler.running_count == 1
        gate.release()
        await mount.settled()


async def test_a_fill_starts_at_the_offset_that_somebody_waits_for(tmp_path: Path, cold: MemoryCold) -> None:
    gate = cold.hold("read", "big", after_bytes=64 * KIB)
    async with engine_on(tmp_path, cold, numbers=FULL) as mount, mount.opened("big") as inode:
        offset = CHUNK_BYTES + 128 * KIB
        with trio.fail_after(5):
            assert await mount.read(inode, offset + 100, 4096) == DATA[offset + 100 : offset + 4196]
        early: list[bytes] = []

        async def read_what_lies_before() -> None:
            early.append(await mount.read(inode, CHUNK_BYTES, 4096))

        async with trio.open_nursery() as readers:
            readers.start_soon(read_what_lies_before)
            await wait_all_tasks_blocked()
            assert not early
            gate.release()
        assert early == [DATA[CHUNK_BYTES : CHUNK_BYTES + 4096]]
        await mount.settled()
        assert cold.sent_bytes == CHUNK_BYTES
        assert_settled(mount)


async def test_a_small_object_is_answered_when_all_of_it_was_checked(tmp_path: Path, cold: MemoryCold) -> None:
    """A tier compares a whole object with its checksum at the end; nobody may have seen a byte by then."""
    faults = Script(Fault("read", "small", after_bytes=100 * KIB, error=lambda: BadResponse("the checksum does not match")))
    async with engine_on(tmp_path, Faulty(cold, faults), numbers=FULL) as mount:
        with pytest.raises(BadResponse):
            await mount.open("small")
        await mount.settled()
        assert mount.engine.index.chunks(cold.ref("small").object_id) == {}
        assert await mount.cat("small") == DATA[: 100 * KIB]
        assert_settled(mount)


async def test_a_small_object_is_fetched_in_one_range_wherever_the_reader_begins(tmp_path: Path, cold: MemoryCold) -> None:
    faults = Script()
    async with engine_on(tmp_path, Faulty(cold, faults), numbers=FULL) as mount, mount.opened("small") as inode:
        await mount.settled()
        held = mount.engine.holdings.held(cold.ref("small").object_id)
        assert held is not None
        mount.engine.holdings.drop_chunk(held, 0)
        cold.reads.clear()
        assert await mount.read(inode, 64 * KIB, 4096) == DATA[64 * KIB : 64 * KIB + 4096]
        assert cold.reads["small"] == 1


async def test_a_cancelled_reader_leaves_the_fill_running_for_the_others(tmp_path: Path, cold: MemoryCold) -> None:
    gate = cold.hold("read", "big", after_bytes=64 * KIB)
    async with engine_on(tmp_path, cold, numbers=FULL) as mount, mount.opened("big") as inode:
        got: list[bytes] = []

        async def patient() -> None:
            got.append(await mount.read(inode, 200 * KIB, 4096))

        async with trio.open_nursery() as readers:
            impatient = trio.CancelScope()

            async def interrupted() -> None:
                with impatient:
                    await mount.read(inode, 0, CHUNK_BYTES)

            readers.start_soon(interrupted)
            await gate.reached.wait()
            readers.start_soon(patient)
            await wait_all_tasks_blocked()
            impatient.cancel()
            await wait_all_tasks_blocked()
            gate.release()
        assert impatient.cancelled_caught
        assert got == [DATA[200 * KIB : 204 * KIB]]
        await mount.settled()
        assert cold.reads["big"] == 1
        assert_settled(mount)


async def test_cancelling_everything_settles_every_reservation(tmp_path: Path, cold: MemoryCold) -> None:
    cold.hold("read", "big", after_bytes=100 * KIB)
    async with engine_on(tmp_path, cold) as mount:
        inode = await mount.open("big")
        async with trio.open_nursery() as readers:
            for offset in (0, CHUNK_BYTES, 9 * CHUNK_BYTES):
                readers.start_soon(mount.read, inode, offset, CHUNK_BYTES)
            await until(lambda: cold.reads["big"] >= 3)
            await wait_all_tasks_blocked()
            assert mount.ledger.reserved_bytes > 0
            readers.cancel_scope.cancel()
        mount.release(inode)
    assert mount.engine.filler.running_count == 0
    assert mount.ledger.reserved_bytes == 0
    held = mount.engine.holdings.held(cold.ref("big").object_id)
    assert held is None or held.users == 0
    assert mount.ledger.held_bytes >= occupied_bytes(mount.files)


async def test_what_a_failed_fill_left_is_accounted_and_used_again(tmp_path: Path, cold: MemoryCold) -> None:
    faults = Script(
        Fault("read", "big", after_bytes=100 * KIB, error=lambda: Unavailable("gone")),
        Fault("read", "big", after_bytes=100 * KIB, error=lambda: Unavailable("gone")),
    )
    async with engine_on(tmp_path, Faulty(cold, faults), numbers=FULL) as mount, mount.opened("big") as inode:
        for offset in (128 * KIB, 0):  # two failures in different parts of the chunk: together they leave more than each
            with pytest.raises(Unavailable):
                await mount.read(inode, offset, 128 * KIB)
        await mount.settled()
        assert_settled(mount)
        assert 200 * KIB <= mount.ledger.held_bytes <= CHUNK_BYTES
        assert await mount.read(inode, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
        await mount.settled()
        assert mount.ledger.held_bytes == CHUNK_BYTES == mount.engine.index.held_bytes(0)
        assert not mount.engine.holdings.has_residue


async def test_a_fill_that_came_to_nothing_leaves_nothing(tmp_path: Path, cold: MemoryCold) -> None:
    faults = Script(Fault("read", "big", after_bytes=100 * KIB, error=lambda: Unavailable("gone")))
    async with engine_on(tmp_path, Faulty(cold, faults), numbers=FULL) as mount:
        async with mount.opened("big") as inode:
            with pytest.raises(Unavailable):
                await mount.read(inode, 0, 128 * KIB)
        await until(lambda: mount.ledger.held_bytes == 0)
        assert mount.engine.index.hot_count() == 0
        assert occupied_bytes(mount.files) == 0
        assert not mount.engine.holdings.has_residue


async def test_case_03_a_change_between_two_ranges_is_never_mixed(tmp_path: Path, cold: MemoryCold) -> None:
    """Overwritten, in equal size, after the first of the two ranges of a chunk: the rest is an error, not the next version."""
    gate = cold.hold("read", "big", after_bytes=128 * KIB)
    async with engine_on(tmp_path, cold, numbers=FULL) as mount, mount.opened("big") as inode:
        offset = CHUNK_BYTES - 128 * KIB
        assert await mount.read(inode, offset, 4096) == DATA[offset : offset + 4096]
        cold.put("big", content(2, SIZE_BYTES))
        gate.release()
        with pytest.raises(VersionChanged):
            await mount.read(inode, 0, 4096)
        with pytest.raises(VersionChanged):
            await mount.read(inode, 2 * CHUNK_BYTES, 4096)
        await mount.settled()
        assert mount.engine.index.chunks(mount.engine.reader._opened[inode].held.ref.object_id) == {}


async def test_case_07_a_full_cache_is_streamed_past(tmp_path: Path, cold: MemoryCold) -> None:
    """An object larger than the hot tier is filled to the limit, then streamed; it never evicts itself."""
    async with engine_on(tmp_path, cold, capacity_bytes=4 * CHUNK_BYTES) as mount:
        assert await mount.cat("big") == DATA
        await mount.settled()
        assert mount.ledger.used_bytes <= 4 * CHUNK_BYTES
        assert mount.ledger.held_bytes == 4 * CHUNK_BYTES
        assert occupied_bytes(mount.files) <= 4 * CHUNK_BYTES
        assert mount.counted("tiercache_streamed_bytes_total", "data", "full") > 0
        assert cold.sent_bytes <= 1.05 * SIZE_BYTES
        assert await mount.cat("big") == DATA


async def test_case_07_a_chunk_past_the_hot_tier_is_fetched_once_for_all(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=CHUNK_BYTES // 2, numbers=FULL) as mount, mount.opened("big") as inode:
        for offset in range(0, CHUNK_BYTES, 32 * KIB):
            assert await mount.read(inode, offset, 32 * KIB) == DATA[offset : offset + 32 * KIB]
        assert cold.sent_bytes == CHUNK_BYTES
        assert mount.ledger.held_bytes == 0


async def test_case_07_a_disk_without_space_in_the_middle_of_a_chunk(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    gate = cold.hold("read", "big", after_bytes=64 * KIB)
    async with engine_on(tmp_path, cold, files=disk, numbers=FULL) as mount, mount.opened("big") as inode:
        assert await mount.read(inode, 0, 4096) == DATA[:4096]
        disk.writing = no_space
        gate.release()
        assert await mount.read(inode, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
        await mount.settled()
        assert_settled(mount)
        assert not mount.engine.holdings.disks.is_sick(0)
        disk.writing = None
        assert await mount.read(inode, CHUNK_BYTES, CHUNK_BYTES) == DATA[CHUNK_BYTES : 2 * CHUNK_BYTES]
        await mount.settled()
        assert list(mount.engine.index.chunks(cold.ref("big").object_id)) == [1]


async def test_case_09_a_disk_that_fails_writes_is_left_alone_and_comes_back(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, cold, files=disk, numbers=FULL) as mount, mount.opened("big") as inode:
        disk.writing = broken
        assert await mount.read(inode, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
        assert mount.engine.holdings.disks.is_sick(0)
        fetched_bytes = cold.sent_bytes
        assert await mount.read(inode, CHUNK_BYTES, CHUNK_BYTES) == DATA[CHUNK_BYTES : 2 * CHUNK_BYTES]
        assert cold.sent_bytes == fetched_bytes + CHUNK_BYTES  # the disk was not even tried
        disk.writing = None
        mount.clock.pass_seconds(11)
        assert await mount.read(inode, 2 * CHUNK_BYTES, CHUNK_BYTES) == DATA[2 * CHUNK_BYTES : 3 * CHUNK_BYTES]
        await mount.settled()
        assert list(mount.engine.index.chunks(cold.ref("big").object_id)) == [2]


async def test_a_chunk_that_cannot_be_read_back_while_it_is_filled_comes_from_below(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    gate = cold.hold("read", "big", after_bytes=64 * KIB)
    async with engine_on(tmp_path, cold, files=disk, numbers=FULL) as mount, mount.opened("big") as inode:
        disk.reading = broken
        reads = trio.Event()

        async def read_past_it() -> None:
            assert await mount.read(inode, 0, 4096) == DATA[:4096]
            reads.set()

        async with trio.open_nursery() as readers:
            readers.start_soon(read_past_it)
            await gate.reached.wait()
            gate.release()
        assert reads.is_set()


async def test_case_11_an_overloaded_store_is_an_error_for_all_who_wait_and_is_asked_again_later(
    tmp_path: Path, cold: MemoryCold
) -> None:
    faults = Script(Fault("read", "big", error=lambda: Unavailable("503 SlowDown", retry_after_seconds=1.0)))
    async with engine_on(tmp_path, Faulty(cold, faults), numbers=FULL) as mount, mount.opened("big") as inode:
        errors: list[TierError] = []

        async def read() -> None:
            try:
                await mount.read(inode, 0, 4096)
            except Unavailable as error:
                errors.append(error)

        async with trio.open_nursery() as readers:
            for _ in range(5):
                readers.start_soon(read)
        assert len(errors) == 5
        assert await mount.read(inode, 0, 4096) == DATA[:4096]


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 8 * CHUNK_BYTES])
async def test_case_16_objects_of_every_size(tmp_path: Path, cold: MemoryCold, size_bytes: int) -> None:
    cold.put("object", DATA[:size_bytes])
    async with engine_on(tmp_path, cold) as mount:
        for _ in range(2):
            assert await mount.cat("object") == DATA[:size_bytes]
        await mount.settled()
        assert cold.sent_bytes == size_bytes
        async with mount.opened("object") as inode:
            assert await mount.read(inode, size_bytes, 10) == b""
            assert await mount.read(inode, max(0, size_bytes - 3), 10) == DATA[:size_bytes][-3:]
            assert await mount.read(inode, size_bytes + 100, 10) == b""
        assert_settled(mount)
