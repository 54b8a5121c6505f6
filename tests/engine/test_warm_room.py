"""How much of the targets tiercache uses, and what goes when it is too much."""

from __future__ import annotations

from pathlib import Path

from tests.engine.engines import KIB, MIB, Mounted, content, engine_on, warm_on
from tests.engine.test_demotion import demote_all, evict_all, files_on
from tiercache.core.health import Usage
from tiercache.engine.warm_room import GIVING_WAY_SHARE, WarmRoom
from tiercache.tiers.memory import MemoryCold


def room_of(mount: Mounted) -> WarmRoom:
    assert mount.engine.warm is not None
    return mount.engine.warm.room


def occupied_bytes(place: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in files_on(place, "[smp]*"))


async def test_what_is_used_is_counted_and_what_is_written_is_added(tmp_path: Path) -> None:
    cold = MemoryCold()
    cold.put("a", content(1, 3 * MIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path)) as mount:
        room = room_of(mount)
        assert mount.engine.warm is not None
        targets = mount.engine.warm.targets.all
        for target in targets:
            await room.count(target)
        assert room.total_bytes == 0
        await mount.cat("a")
        await demote_all(mount)
        added_bytes = room.total_bytes
        for target in targets:
            await room.count(target)
        assert abs(room.total_bytes - added_bytes) <= len(targets) * 16 * KIB
        assert room.total_bytes == occupied_bytes(tmp_path)


async def test_the_oldest_copies_go_first_and_what_is_left_is_still_read(tmp_path: Path) -> None:
    cold = MemoryCold()
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=64 * KIB)) as mount:
        keys = [f"f{number}" for number in range(6)]
        for number, key in enumerate(keys):
            cold.put(key, content(number, 2 * MIB))
            await mount.cat(key)
            await demote_all(mount)
        await evict_all(mount)
        room = room_of(mount)
        assert mount.engine.warm is not None
        assert await room.make_room(2 * 3 * MIB) >= 2 * 3 * MIB
        holds = [await mount.engine.warm.reads.holds((await mount.entry(key)).ref) for key in keys]
        assert holds == [False, False, True, True, True, True]
        assert len(files_on(tmp_path, "shards")) == 4 * 3
        assert len(files_on(tmp_path, "manifests")) == 4 * 2
        for number, key in enumerate(keys):
            assert await mount.cat(key) == content(number, 2 * MIB)


async def test_a_pack_that_goes_takes_its_members_along(tmp_path: Path) -> None:
    cold = MemoryCold()
    for number in range(10):
        cold.put(f"f{number}", content(number, 20 * KIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=64 * KIB)) as mount:
        for number in range(10):
            await mount.cat(f"f{number}")
        await demote_all(mount)
        await evict_all(mount)
        assert await room_of(mount).make_room(1) > 0
        assert files_on(tmp_path, "[smp]*") == []
        for number in range(10):
            assert await mount.cat(f"f{number}") == content(number, 20 * KIB)


async def test_one_full_target_is_no_reason_to_drop_copies_while_the_others_have_room(tmp_path: Path) -> None:
    cold = MemoryCold()
    cold.put("a", content(1, 3 * MIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, count=4)) as mount:
        await mount.cat("a")
        await demote_all(mount)
        room = room_of(mount)
        assert mount.engine.warm is not None
        targets = mount.engine.warm.targets.all
        for target in targets:
            await room.count(target)
        full = Usage(1, targets[0].usage.total_bytes)
        targets[0].usage = full
        assert room.excess_bytes() == 0
        targets[1].usage = full
        assert room.excess_bytes() == room.total_bytes // GIVING_WAY_SHARE > 0
        assert room.excess_bytes() == 0, "not again before a minute has passed"
