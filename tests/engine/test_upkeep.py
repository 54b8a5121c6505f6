"""What the engine does by itself: measure, reclaim between the watermarks, sync, sweep, see how late the loop is."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.engine.engines import CHUNK_BYTES, Lagging, content, engine_on, hot_tier, until
from tests.engine.faults import broken, failing_disk
from tiercache.engine import upkeep
from tiercache.errors import HotSick
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.memory import MemoryCold

COUNT = 20
FILES = {f"f{number:02}": content(number, CHUNK_BYTES) for number in range(COUNT)}


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    for key, data in FILES.items():
        store.put(key, data)
    return store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "PROBE_SECONDS", 0.01)


async def test_reclaim_goes_from_the_high_to_the_low_watermark(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        for key in FILES:
            await mount.cat(key)
            mount.clock.pass_seconds(10)
        await mount.settled()
        mount.ledger.capacity_bytes = upkeep.FAN_OUT_BYTES + COUNT * CHUNK_BYTES
        mount.engine.nursery.start_soon(mount.engine.upkeep.run)
        await until(lambda: not mount.ledger.over_high and mount.engine.index.hot_count() < COUNT)
        await until(lambda: mount.ledger.to_low_bytes() == 0)
        left = mount.engine.index.hot_count()
        assert COUNT - 4 <= left < COUNT
        assert mount.engine.index.hot(cold.ref("f00").object_id) is None or left == COUNT - 1
        assert mount.engine.index.hot(cold.ref(f"f{COUNT - 1:02}").object_id) is not None


async def test_overhead_counts_the_index_and_the_directories(tmp_path: Path, cold: MemoryCold) -> None:
    class Large(MemoryIndex):
        def size_bytes(self) -> int:
            return 12_345_000

    async with engine_on(tmp_path, cold, index=Large()) as mount:
        await mount.engine.upkeep.observe(0)
        assert mount.ledger.overhead_bytes == upkeep.FAN_OUT_BYTES + 12_345_000


async def test_case_06_others_who_fill_the_disk_make_the_cache_give_way(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        for key in FILES:
            await mount.cat(key)
        await mount.settled()
        mount.clock.pass_seconds(60)
        mount.ledger.min_free_bytes = 10 * CHUNK_BYTES
        mount.ledger.observe_filesystem(5 * CHUNK_BYTES, 1 << 40)
        assert mount.ledger.over_high
        while excess_bytes := mount.ledger.to_low_bytes():
            assert await mount.engine.holdings.reclaim(0, excess_bytes)
        assert mount.engine.index.hot_count() <= COUNT - 5
        for key, data in FILES.items():
            assert await mount.cat(key) == data


async def test_case_09_a_disk_that_fails_everything_ends_nothing_and_comes_back(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, files=disk, index=index, capacity_bytes=10 * CHUNK_BYTES, ttl_seconds=1e9) as mount:
        mount.engine.start()
        for key, data in FILES.items():
            assert await mount.cat(key) == data
            mount.clock.pass_seconds(3)
        disk.writing = disk.reading = disk.opening = disk.unlinking = disk.syncing = broken
        index.failing = lambda: HotSick("the index's disk is broken")
        for key, data in FILES.items():
            assert await mount.cat(key) == data
        disk.writing = disk.reading = disk.opening = disk.unlinking = disk.syncing = None
        index.failing = None
        mount.clock.pass_seconds(11)
        mount.engine.filler._kept.clear()  # what was kept in memory meanwhile
        for _ in range(2):
            for key, data in FILES.items():
                assert await mount.cat(key) == data
                mount.clock.pass_seconds(3)
        await mount.settled()
        assert mount.engine.index.hot_count() > 0
        assert not mount.engine.holdings.disks.is_sick(0)


async def test_sync_runs_and_its_loss_is_dropped(tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, cold, files=disk) as mount:
        assert await mount.cat("f00") == FILES["f00"]
        await mount.settled()
        disk.syncing = broken
        mount.engine.nursery.start_soon(mount.engine.upkeep.run)
        await until(lambda: mount.engine.index.hot_count() == 0)
        await until(lambda: mount.ledger.held_bytes == 0)


async def test_a_sweep_at_the_start_removes_strays(tmp_path: Path, cold: MemoryCold) -> None:
    files = hot_tier(tmp_path)
    files.create(cold.ref("f00").object_id, CHUNK_BYTES, 0)
    async with engine_on(tmp_path, cold, files=files) as mount:
        keeper = upkeep.Upkeep(
            mount.engine.index, files, mount.engine.holdings, late=lambda seconds: None, harvest=list, sweep=True
        )
        mount.engine.nursery.start_soon(keeper.run)
        await until(lambda: not list(files.walk(0)))


async def test_the_loop_reports_how_late_it_is(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        late: list[float] = []
        keeper = upkeep.Upkeep(
            mount.engine.index, mount.files, mount.engine.holdings, late=late.append, harvest=list, sweep=False
        )
        mount.engine.nursery.start_soon(keeper.run)
        with trio.fail_after(10):
            await until(lambda: len(late) >= 3)
        assert all(seconds >= 0 for seconds in late)
