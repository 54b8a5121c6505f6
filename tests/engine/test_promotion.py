"""Promotion: the rest of a file that is used comes by itself, a look into a large one stays a look."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.engine.engines import CHUNK_BYTES, MIB, content, engine_on, limits, until
from tiercache.engine.promotion import WISHES, WORKERS
from tiercache.errors import HotFull, Unavailable
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.memory import MemoryCold

SIZE_BYTES = 3 * MIB
DATA = content(1, SIZE_BYTES)


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    store.put("big", DATA)
    for number in range(WORKERS):
        store.put(f"f{number}", content(2 + number, 2 * MIB))
    return store


async def test_a_small_file_is_promoted_whole_after_one_read(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=limits(read_ahead_bytes=0)) as mount:
        mount.engine.nursery.start_soon(mount.engine.promotion.run)
        async with mount.opened("big") as inode:
            assert await mount.read(inode, 5 * CHUNK_BYTES, 4096) == DATA[5 * CHUNK_BYTES : 5 * CHUNK_BYTES + 4096]
            held = mount.engine.holdings.held(cold.ref("big").object_id)
            assert held is not None
            await until(lambda: held.complete)
        assert cold.sent_bytes == SIZE_BYTES
        await mount.settled()
        record = mount.engine.index.hot(cold.ref("big").object_id)
        assert record is not None
        assert record.complete


async def test_a_large_file_is_promoted_when_a_quarter_of_it_is_there(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=limits(whole_file_bytes=MIB, read_ahead_bytes=0)) as mount:
        mount.engine.nursery.start_soon(mount.engine.promotion.run)
        async with mount.opened("big") as inode:
            held = mount.engine.holdings.held(cold.ref("big").object_id)
            assert held is not None
            assert await mount.read(inode, 0, CHUNK_BYTES) == DATA[:CHUNK_BYTES]
            await until(lambda: mount.engine.filler.running_count == 0)
            assert held.present == {0}
            assert await mount.read(inode, CHUNK_BYTES, 3 * CHUNK_BYTES) == DATA[CHUNK_BYTES : 4 * CHUNK_BYTES]
            await until(lambda: held.complete)


async def test_all_workers_are_woken(tmp_path: Path, cold: MemoryCold) -> None:
    """Wishes that come while all workers wait are carried out at the same time, not by the one that waited last."""
    async with engine_on(tmp_path, cold) as mount:
        mount.engine.nursery.start_soon(mount.engine.promotion.run)
        await trio.testing.wait_all_tasks_blocked()
        gate = cold.hold("read")
        for number in range(WORKERS):
            mount.engine.promotion.wish(cold.ref(f"f{number}"))
        await until(lambda: all(cold.reads[f"f{number}"] for number in range(WORKERS)))
        gate.release()
        await mount.settled()


async def test_wishes_are_bounded_and_an_object_is_wished_for_once(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        ref = cold.ref("big")
        for _ in range(10):
            mount.engine.promotion.wish(ref)
        assert len(mount.engine.promotion._wishes) == 1
        for number in range(WISHES + 10):
            mount.engine.promotion.wish(cold.put("other", str(number).encode()))
        assert len(mount.engine.promotion._wishes) == WISHES


async def test_a_wish_that_fails_leaves_the_worker_at_work(tmp_path: Path, cold: MemoryCold) -> None:
    faults = Script(*(Fault("read", "f0", error=lambda: Unavailable("gone")) for _ in range(WORKERS)))
    async with engine_on(tmp_path, Faulty(cold, faults)) as mount:
        mount.engine.nursery.start_soon(mount.engine.promotion.run)
        for _ in range(WORKERS):
            left = len(faults.left)
            mount.engine.promotion.wish(cold.ref("f0"))
            await until(lambda left=left: len(faults.left) < left)  # type: ignore[misc]
            await until(lambda: not mount.engine.promotion._busy)
        mount.engine.promotion.wish(cold.ref("f1"))
        await until(lambda: mount.engine.index.hot(cold.ref("f1").object_id) is not None)
        await mount.settled()


async def test_what_does_not_fit_is_said(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=4 * CHUNK_BYTES) as mount:
        with pytest.raises(HotFull, match="big"):
            await mount.engine.promotion.fetch(cold.ref("big"))
        await mount.settled()
        assert cold.sent_bytes == 4 * CHUNK_BYTES, "three that fit below the low watermark, and the one that does not"


async def test_a_chunk_that_once_went_past_the_hot_tier_is_fetched_when_there_is_room(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=10 * CHUNK_BYTES) as mount:
        assert await mount.cat("f0") == content(2, 2 * MIB)
        with pytest.raises(HotFull):
            await mount.engine.promotion.fetch(cold.ref("f1"))
        mount.clock.pass_seconds(60)
        await mount.engine.promotion.fetch(cold.ref("f1"))
        await mount.settled()
        record = mount.engine.index.hot(cold.ref("f1").object_id)
        assert record is not None
        assert record.complete
