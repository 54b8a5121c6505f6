"""Pins: durable, obeyed by eviction, fetched in the background, and refused with numbers when they cannot fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from tests.engine.engines import CHUNK_BYTES, DATASET, Clock, Mounted, content, engine_on, hot_tier, until
from tiercache.core.record import Pin
from tiercache.engine.pinning import AT_ONCE, key_of
from tiercache.errors import NotFound, Unavailable
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.memory import MemoryCold

COUNT = 6
FILES = {f"train/{number}": content(number, CHUNK_BYTES) for number in range(COUNT)}


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    for key, data in FILES.items():
        store.put(key, data)
    store.put("trainer", content(50, 1000))
    return store


def pin(prefix: str, *, exact: bool = False, expires_seconds: int = 0) -> Pin:
    return Pin(DATASET, prefix, exact, "alice", "the run of this week", 0, expires_seconds, 0)


async def hold(mount: Mounted, wanted: Pin) -> Pin:
    admission, sized = await mount.engine.pinning.admit([wanted], mount.engine.facts.hot_bytes)
    assert admission.refusal == ""
    await mount.engine.pinning.add(sized)
    return sized[0]


async def fetched(mount: Mounted, held: Pin) -> None:
    await until(lambda: mount.engine.pinning.progress(key_of(held)).done)


async def test_a_pinned_prefix_is_fetched_and_nothing_beside_it(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        held = await hold(mount, pin("train"))
        await fetched(mount, held)
        await mount.settled()
        progress = mount.engine.pinning.progress(key_of(held))
        assert (progress.objects_count, progress.hot_objects_count, progress.failed_count) == (COUNT, COUNT, 0)
        assert progress.hot_bytes == progress.wanted_bytes == held.bytes_at_admission == COUNT * CHUNK_BYTES
        assert mount.engine.index.hot_count() == COUNT
        cold.requests.clear()
        for key, data in FILES.items():
            assert await mount.cat(key) == data
        assert cold.requests["read"] == 0


async def test_what_is_pinned_is_not_evicted(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=4 * CHUNK_BYTES) as mount:
        held = await hold(mount, pin("train/0", exact=True))
        await fetched(mount, held)
        for _ in range(3):
            for key, data in FILES.items():
                mount.clock.pass_seconds(60)
                assert await mount.cat(key) == data
        await mount.settled()
        assert mount.engine.index.hot(cold.ref("train/0").object_id) is not None
        assert mount.counted("tiercache_evictions_total") > 0
        await mount.engine.pinning.remove([key_of(held)])
        for key in list(FILES)[1:]:
            mount.clock.pass_seconds(60)
            await mount.cat(key)
        await mount.settled()
        assert mount.engine.index.hot(cold.ref("train/0").object_id) is None


async def test_a_pin_makes_room_among_what_is_not_pinned(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=4 * CHUNK_BYTES) as mount:
        for key in list(FILES)[:4]:
            await mount.cat(key)
        mount.clock.pass_seconds(60)
        held = await hold(mount, pin("train/5"))
        await fetched(mount, held)
        assert mount.engine.pinning.progress(key_of(held)).hot_objects_count == 1


async def test_what_cannot_fit_is_refused_with_the_numbers_and_nothing_changes(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=4 * CHUNK_BYTES) as mount:
        admission, _ = await mount.engine.pinning.admit([pin("train/")], mount.engine.facts.hot_bytes)
        assert str(COUNT * CHUNK_BYTES) in admission.refusal
        assert mount.engine.pinning.pins() == []
        assert mount.engine.index.hot_count() == 0


async def test_pins_that_are_replaced_are_not_counted_twice(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=8 * CHUNK_BYTES) as mount:
        await hold(mount, pin("train/"))
        await hold(mount, pin("train/"))
        assert mount.engine.pinning.pinned_bytes() == COUNT * CHUNK_BYTES


async def test_overlapping_pins_count_once(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=8 * CHUNK_BYTES) as mount:
        pinning = mount.engine.pinning
        await hold(mount, pin("train/1", exact=True))
        await hold(mount, pin("train/"))
        assert pinning.pinned_bytes() == COUNT * CHUNK_BYTES
        await hold(mount, pin("train/2", exact=True))
        assert pinning.pinned_bytes() == pinning.pinned_bytes(DATASET) == COUNT * CHUNK_BYTES
        assert pinning.pinned_bytes("another") == 0
        await pinning.remove([key_of(pin("train/"))])
        assert pinning.pinned_bytes() == 2 * CHUNK_BYTES


async def test_files_count_as_the_blocks_that_they_take(tmp_path: Path, cold: MemoryCold) -> None:
    for number in range(100):
        cold.put(f"small/{number:03}", b"x")
    async with engine_on(tmp_path, cold) as mount:
        block_bytes = mount.engine.room.ledgers[0].block_bytes
        assert block_bytes > 1
        held = await hold(mount, pin("small/"))
        assert held.bytes_at_admission == 100 * block_bytes
        await fetched(mount, held)
        await mount.settled()
        progress = mount.engine.pinning.progress(key_of(held))
        assert (progress.wanted_bytes, progress.hot_bytes) == (100 * block_bytes, 100 * block_bytes)
        assert mount.engine.room.ledgers[0].used_bytes >= progress.hot_bytes


async def test_a_few_objects_are_fetched_at_a_time_in_the_order_of_the_listing(tmp_path: Path, cold: MemoryCold) -> None:
    gates = [cold.hold("read", f"train/{number}") for number in range(COUNT)]
    async with engine_on(tmp_path, cold) as mount:
        held = await hold(mount, pin("train"))
        for gate in gates[:AT_ONCE]:
            await gate.reached.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not any(gate.reached.is_set() for gate in gates[AT_ONCE:])
        progress = mount.engine.pinning.progress(key_of(held))
        assert (progress.objects_count, progress.hot_objects_count, progress.done) == (COUNT, 0, False)
        gates[2].release()
        await gates[AT_ONCE].reached.wait()
        assert (progress.hot_objects_count, progress.hot_bytes) == (1, CHUNK_BYTES)
        assert not gates[AT_ONCE + 1].reached.is_set()
        for gate in gates:
            gate.release()
        await fetched(mount, held)
        assert (progress.hot_objects_count, progress.failed_count) == (COUNT, 0)


async def test_a_pin_of_nothing_is_an_error(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        with pytest.raises(NotFound):
            await mount.engine.pinning.admit([pin("validation")], mount.engine.facts.hot_bytes)


async def test_pins_outlive_the_process_and_are_fetched_at_its_next_start(tmp_path: Path, cold: MemoryCold) -> None:
    index, files = MemoryIndex(), hot_tier(tmp_path)
    gate = cold.hold("read")
    async with engine_on(tmp_path, cold, index=index, files=files) as mount:
        held = await hold(mount, pin("train"))
        await gate.reached.wait()
    gate.release()
    async with engine_on(tmp_path, cold, index=index.reopened(other_boot=False), files=files) as mount:
        assert mount.engine.pinning.pins() == [held]
        assert mount.engine.pinning.protects(DATASET, "train/3")
        mount.engine.nursery.start_soon(mount.engine.pinning.run)
        await until(lambda: mount.engine.pinning.hot_bytes(key_of(held)) == COUNT * CHUNK_BYTES)
        await mount.settled()


async def test_an_expired_pin_protects_nothing(tmp_path: Path, cold: MemoryCold) -> None:
    clock = Clock()
    async with engine_on(tmp_path, cold, clock=clock) as mount:
        held = await hold(mount, pin("train", expires_seconds=int(clock.now) + 100))
        await fetched(mount, held)
        assert mount.engine.pinning.protects(DATASET, "train/3")
        clock.pass_seconds(100)
        assert not mount.engine.pinning.protects(DATASET, "train/3")
        assert mount.engine.pinning.pins() == []
        mount.engine.nursery.start_soon(mount.engine.pinning.run)
        await until(lambda: mount.engine.index.pins() == [])


async def test_unpin_stops_the_fetch(tmp_path: Path, cold: MemoryCold) -> None:
    gate = cold.hold("read", "train/1")
    async with engine_on(tmp_path, cold) as mount:
        held = await hold(mount, pin("train"))
        await gate.reached.wait()
        await mount.engine.pinning.remove([key_of(held)])
        gate.release()
        await mount.settled()
        assert mount.engine.index.hot_count() == AT_ONCE
        with pytest.raises(NotFound):
            mount.engine.pinning.progress(key_of(held))


async def test_what_could_not_be_fetched_is_counted_with_its_error(tmp_path: Path, cold: MemoryCold) -> None:
    faults = Script(Fault("read", "train/2", error=lambda: Unavailable("the store is away")))
    async with engine_on(tmp_path, Faulty(cold, faults)) as mount:
        held = await hold(mount, pin("train"))
        await fetched(mount, held)
        progress = mount.engine.pinning.progress(key_of(held))
        assert (progress.hot_objects_count, progress.failed_count) == (COUNT - 1, 1)
        assert "away" in progress.last_error


async def test_case_05_a_listing_that_fails_is_a_failed_pin_not_an_empty_one(tmp_path: Path, cold: MemoryCold) -> None:
    faults = Script()
    async with engine_on(tmp_path, Faulty(cold, faults)) as mount:
        held = await hold(mount, pin("train"))
        await fetched(mount, held)
        faults.left += [Fault("list", error=lambda: Unavailable("throttled")) for _ in range(20)]
        mount.clock.pass_seconds(61)
        mount.engine.pinning.fetch(held)
        await fetched(mount, held)
        progress = mount.engine.pinning.progress(key_of(held))
        assert progress.failed_count == 1
        assert "throttled" in progress.last_error
