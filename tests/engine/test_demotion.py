"""Demotion: what leaves the hot tier has a warm copy first, and nothing is written twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from tests.engine.engines import KIB, MIB, Lagging, Mounted, content, engine_on, limits, until, warm_on
from tiercache.core.record import HotRecord
from tiercache.engine.demotion import Outcome
from tiercache.errors import HotSick
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.memory import MemoryCold


def files_on(place: Path, kind: str) -> list[Path]:
    return sorted(path for path in place.glob(f"target*/{kind}/**/*") if path.is_file())


def hot_home(path: Path) -> Path:
    path.mkdir()
    return path


def replace_by_file(directory: Path) -> None:
    """Nothing can be a target there."""
    shutil.rmtree(directory)
    directory.write_text("a file is in the way")


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)


async def demote_all(mount: Mounted) -> dict[str, Outcome]:
    """Of everything that is hot: what became of it, by key."""
    await mount.settled()
    outcomes: dict[str, Outcome] = {}

    def settled(record: HotRecord, outcome: Outcome) -> None:
        outcomes[record.key] = outcome

    assert mount.engine.demotion is not None
    await mount.engine.demotion.demote(list(mount.engine.index.all_hot()), settled)
    return outcomes


async def evict_all(mount: Mounted) -> None:
    await mount.settled()
    await mount.engine.holdings.evict([record.object_id for record in mount.engine.index.all_hot()])


async def test_large_objects_get_copies_of_their_own_and_small_ones_share_a_pack(tmp_path: Path) -> None:
    cold = MemoryCold()
    contents = {f"small{number}": content(number, 10 * KIB + number) for number in range(20)}
    contents |= {"large": content(99, 3 * MIB + 5), "text": b"all work and no play " * 100_000}
    for key, data in contents.items():
        cold.put(key, data)
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=64 * KIB)) as mount:
        for key in contents:
            await mount.cat(key)
        assert set((await demote_all(mount)).values()) == {Outcome.WRITTEN}
        assert len({path.name for path in files_on(tmp_path, "manifests")}) == 2
        assert len({path.name for path in files_on(tmp_path, "packs")}) == 1
        await evict_all(mount)
        read_before = cold.requests["read"]
        for key, data in contents.items():
            assert await mount.cat(key) == data
        assert cold.requests["read"] == read_before
        assert mount.counted("tiercache_demotions_total", "pack") == 20
        assert mount.counted("tiercache_demotions_total", "written") == 2


async def test_a_large_file_with_a_warm_copy_is_opened_and_read_without_the_store(tmp_path: Path) -> None:
    cold = MemoryCold()
    old, new = content(1, 3 * MIB), content(2, 3 * MIB)
    cold.put("large", old)
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=64 * KIB)) as mount:
        await mount.cat("large")
        assert await demote_all(mount) == {"large": Outcome.WRITTEN}
        await evict_all(mount)
        mount.clock.pass_seconds(30)
        asked_before = cold.requests.copy()
        assert await mount.cat("large") == old
        assert cold.requests == asked_before
        await mount.settled()
        await evict_all(mount)
        cold.put("large", new)
        mount.clock.pass_seconds(31)  # the name is not fresh any more
        assert await mount.cat("large") == new


async def test_what_a_node_has_committed_no_other_writes(tmp_path: Path) -> None:
    cold = MemoryCold()
    for number in range(10):
        cold.put(f"small{number}", content(number, 10 * KIB))
    cold.put("large", content(99, 2 * MIB))
    settings = warm_on(tmp_path, pack_threshold_bytes=64 * KIB)
    other_home = hot_home(tmp_path / "other")
    async with engine_on(tmp_path, cold, warm=settings) as one, engine_on(other_home, cold, warm=settings) as other:
        for mount in (one, other):
            for number in range(10):
                await mount.cat(f"small{number}")
            await mount.cat("large")
        assert set((await demote_all(one)).values()) == {Outcome.WRITTEN}
        before = files_on(tmp_path, "*")
        assert set((await demote_all(other)).values()) == {Outcome.ALREADY}
        assert files_on(tmp_path, "*") == before
        assert other.counted("tiercache_demoted_stored_bytes_total") == 0


async def test_what_two_want_to_demote_at_once_is_written_once(tmp_path: Path) -> None:
    """Ahead of need, and by hand."""
    cold = MemoryCold()
    for number in range(10):
        cold.put(f"small{number}", content(number, 10 * KIB))
    cold.put("large", content(99, 2 * MIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=64 * KIB)) as mount:
        for number in range(10):
            await mount.cat(f"small{number}")
        await mount.cat("large")
        found: list[dict[str, Outcome]] = []

        async def demote() -> None:
            found.append(await demote_all(mount))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(demote)
            nursery.start_soon(demote)
        for key in found[0]:
            assert {outcomes[key] for outcomes in found} == {Outcome.WRITTEN, Outcome.ALREADY}, key
        assert len({path.name for path in files_on(tmp_path, "packs")}) == 1
        assert len({path.name for path in files_on(tmp_path, "manifests")}) == 1


async def test_no_pack_is_written_when_none_of_its_members_is_there_any_more(tmp_path: Path) -> None:
    cold = MemoryCold()
    for number in range(3):
        cold.put(f"small{number}", content(number, 10 * KIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=64 * KIB)) as mount:
        for number in range(3):
            await mount.cat(f"small{number}")
        await mount.settled()
        for path in (tmp_path / "hot0" / "objects").glob("*/*"):
            path.unlink()
        assert set((await demote_all(mount)).values()) == {Outcome.FAILED}
        assert files_on(tmp_path, "[smpd]*") == []


async def test_parts_and_old_versions_are_not_worth_a_copy(tmp_path: Path) -> None:
    cold = MemoryCold()
    cold.put("part", content(1, 200 * MIB // 64))
    cold.put("old", content(2, MIB))
    numbers = limits(whole_file_bytes=0)
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path), numbers=numbers, ttl_seconds=0.0) as mount:
        async with mount.opened("part") as inode:
            await mount.read(inode, 0, 4 * KIB)
        await mount.cat("old")
        await mount.settled()
        cold.put("old", content(3, MIB))
        await mount.entry("old")
        outcomes = await demote_all(mount)
        assert outcomes["old"] is Outcome.SKIPPED
        assert outcomes["part"] is Outcome.SKIPPED
        assert files_on(tmp_path, "shards") == []


async def test_a_hot_copy_that_is_damaged_is_not_demoted_but_dropped(tmp_path: Path) -> None:
    cold = MemoryCold()
    for number in range(4):
        cold.put(f"small{number}", content(number, 10 * KIB))
    cold.put("large", content(9, 2 * MIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=64 * KIB)) as mount:
        for key in ("small0", "small1", "small2", "small3", "large"):
            await mount.cat(key)
        await mount.settled()
        for key in ("small1", "large"):
            name = (await mount.entry(key)).object_id.hex()
            flip_a_bit(tmp_path / "hot0" / "objects" / name[:2] / name)
        outcomes = await demote_all(mount)
        assert {key for key, outcome in outcomes.items() if outcome is Outcome.FAILED} == {"small1", "large"}
        assert {record.key for record in mount.engine.index.all_hot()} == {"small0", "small2", "small3"}
        assert await mount.cat("small1") == content(1, 10 * KIB)
        assert await mount.cat("large") == content(9, 2 * MIB)


@pytest.mark.parametrize("pack_threshold_bytes", [64 * KIB, 0])
async def test_a_damaged_hot_copy_that_an_index_in_trouble_cannot_forget_is_a_failure(
    tmp_path: Path, pack_threshold_bytes: int
) -> None:
    cold, index = MemoryCold(), Lagging(MemoryIndex())
    for number in range(3):
        cold.put(f"file{number}", content(number, 10 * KIB))
    async with engine_on(tmp_path, cold, index=index, warm=warm_on(tmp_path, pack_threshold_bytes=pack_threshold_bytes)) as mount:
        for number in range(3):
            await mount.cat(f"file{number}")
        await mount.settled()
        for record in mount.engine.index.all_hot():
            name = record.object_id.hex()
            flip_a_bit(tmp_path / "hot0" / "objects" / name[:2] / name)
        outcomes: list[Outcome] = []
        index.failing = lambda: HotSick("the disk of the index")
        assert mount.engine.demotion is not None
        await mount.engine.demotion.demote(list(index.all_hot()), lambda _, outcome: outcomes.append(outcome))
        index.failing = None
        assert outcomes == [Outcome.FAILED] * 3


async def test_a_copy_is_written_with_k_targets_and_not_with_fewer(tmp_path: Path) -> None:
    cold = MemoryCold()
    data = content(1, 2 * MIB)
    cold.put("a", data)
    settings = warm_on(tmp_path, 2, 2)
    async with engine_on(tmp_path, cold, warm=settings) as mount:
        await mount.cat("a")
        warm = mount.engine.warm
        assert warm is not None
        for target in warm.targets.all[:2]:
            replace_by_file(Path(target.path))
        assert (await demote_all(mount))["a"] is Outcome.FAILED  # 2 manifests of the 3 that are wanted
        assert files_on(tmp_path, "manifests") == []
        assert await mount.cat("a") == data


async def test_a_full_hot_tier_waits_for_demotion_and_drops_nothing_undemoted(tmp_path: Path) -> None:
    cold = MemoryCold()
    contents = {f"f{number}": content(number, 700 * KIB) for number in range(60)}
    for key, data in contents.items():
        cold.put(key, data)
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path, pack_threshold_bytes=0), capacity_bytes=8 * MIB) as mount:
        mount.engine.start()
        for key, data in contents.items():
            assert await mount.cat(key) == data
        fetched = cold.requests["read"]
        for key, data in reversed(contents.items()):
            assert await mount.cat(key) == data
        assert cold.requests["read"] == fetched
        assert mount.ledger.used_bytes <= mount.ledger.capacity_bytes


async def test_when_the_warm_tier_refuses_nobody_waits_for_it(tmp_path: Path) -> None:
    cold = MemoryCold()
    contents = {f"f{number}": content(number, 700 * KIB) for number in range(30)}
    for key, data in contents.items():
        cold.put(key, data)
    settings = warm_on(tmp_path)
    async with engine_on(tmp_path, cold, warm=settings, capacity_bytes=8 * MIB) as mount:
        for path in settings.targets:
            replace_by_file(Path(path))
        mount.engine.start()
        for key, data in contents.items():
            assert await mount.cat(key) == data
        with trio.fail_after(10):
            for key, data in contents.items():
                assert await mount.cat(key) == data


async def test_a_pack_closes_after_a_bounded_wait(tmp_path: Path) -> None:
    cold = MemoryCold()
    for number in range(30):
        cold.put(f"f{number}", content(number, 200 * KIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path), capacity_bytes=6 * MIB) as mount:
        mount.engine.start()
        for number in range(26):  # close to the low watermark: candidates, and nobody waits for room
            await mount.cat(f"f{number}")
        await until(lambda: bool(files_on(tmp_path, "packs")))


async def test_residency_tells_of_a_warm_copy_that_this_node_has_seen(tmp_path: Path) -> None:
    cold = MemoryCold()
    cold.put("a", content(1, 2 * MIB))
    async with engine_on(tmp_path, cold, warm=warm_on(tmp_path)) as mount:
        await mount.cat("a")
        await mount.settled()
        entry = await mount.entry("a")
        assert mount.engine.facts.residency(entry) == "hot,cold"
        await demote_all(mount)
        assert mount.engine.facts.residency(entry) == "hot,warm,cold"
        await evict_all(mount)
        assert mount.engine.facts.residency(entry) == "warm,cold"
