"""Hot directories from one start to the next: positions, trust, and whose turn it is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.engines import CHUNK_BYTES, DATASET, Mounted, content, engine_on, ledger_of
from tiercache.config import HotSettings
from tiercache.core.record import Pin
from tiercache.engine import hotset
from tiercache.engine.hotset import HotSet, open_hot
from tiercache.errors import SetupError
from tiercache.index.index import PutPin
from tiercache.tiers.memory import MemoryCold

FILES = {f"f{number}": content(number, CHUNK_BYTES) for number in range(8)}
PIN = Pin(DATASET, "", False, "alice", "", 0, 0, 1000)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on a disk (pytest's own may be on a tmpfs, no place for a cache), and a kernel that can be rebooted."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        boot = Path(path) / "boot_id"
        boot.write_text("first\n")
        monkeypatch.setattr(hotset, "BOOT_ID", boot)
        yield Path(path)


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    for key, data in FILES.items():
        store.put(key, data)
    return store


def settings(disk: Path, *names: str) -> HotSettings:
    return HotSettings(paths=tuple(str(disk / name) for name in names), capacity_bytes=1 << 30, min_free_bytes=0)


async def opened(disk: Path, *names: str) -> HotSet:
    return await open_hot(settings(disk, *names), str(disk / "mnt"), [])


@asynccontextmanager
async def mounted(hot: HotSet, cold: MemoryCold, disk: Path):  # type: ignore[no-untyped-def]
    async with engine_on(disk, cold, index=hot.index, files=hot.files) as mount:
        yield mount


async def read_all(mount: Mounted) -> None:
    for key, data in FILES.items():
        assert await mount.cat(key) == data
    await mount.settled()


async def test_case_08_what_was_read_is_hot_after_a_clean_stop_without_a_look_at_the_files(disk: Path, cold: MemoryCold) -> None:
    hot = await opened(disk, "a")
    assert hot.sweep  # the directory is new: a marker that was removed by hand leaves files behind
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    await hot.close(clean=True)
    (disk / "boot_id").write_text("second\n")
    hot = await opened(disk, "a")
    assert (hot.notices, hot.sweep) == ([], False)
    assert hot.ledgers[0].held_bytes == len(FILES) * CHUNK_BYTES
    cold.requests.clear()
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    assert cold.requests["read"] == 0
    await hot.close(clean=True)


@pytest.mark.parametrize("boot", ["first", "second"])
async def test_after_an_unclean_stop_chunks_are_trusted_if_the_kernel_is_the_same(
    disk: Path, cold: MemoryCold, boot: str
) -> None:
    hot = await opened(disk, "a")
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    await hot.close(clean=False)
    victim = next(path for path in (disk / "a" / "objects").rglob("*") if path.is_file())
    if boot == "second":
        victim.write_bytes(bytes(CHUNK_BYTES))
    (disk / "boot_id").write_text(f"{boot}\n")
    hot = await opened(disk, "a")
    assert hot.sweep
    assert len(hot.notices) == 1
    cold.requests.clear()
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    assert cold.requests["read"] == (1 if boot == "second" else 0)
    await hot.close(clean=True)


async def test_directories_may_be_listed_in_another_order_or_renamed(disk: Path, cold: MemoryCold) -> None:
    hot = await opened(disk, "a", "b")
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    assert all(hot.index.held_bytes(position) for position in (0, 1))
    await hot.close(clean=True)
    (disk / "b").rename(disk / "c")
    hot = await opened(disk, "c", "a")
    assert hot.notices == []
    cold.requests.clear()
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    assert cold.requests["read"] == 0
    await hot.close(clean=True)


@pytest.mark.parametrize("left", ["a", "b"])
async def test_a_directory_that_is_not_configured_any_more_costs_its_files_only(disk: Path, cold: MemoryCold, left: str) -> None:
    hot = await opened(disk, "a", "b")
    await hot.index.commit([PutPin(PIN)], sync=True)
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    await hot.close(clean=True)
    hot = await opened(disk, left)
    assert hot.sweep
    if left == "a":  # where the index lies
        assert "not configured any more" in hot.notices[0]
        assert hot.index.pins() == [PIN]
        assert hot.index.health.recovered_count > 0
    async with mounted(hot, cold, disk) as mount:
        await mount.engine.holdings.sweep(0)
        await read_all(mount)
        assert mount.ledger.held_bytes == hot.index.held_bytes(0) == len(FILES) * CHUNK_BYTES
    await hot.close(clean=True)


async def test_a_damaged_index_is_rebuilt_and_its_copies_verified(disk: Path, cold: MemoryCold) -> None:
    hot = await opened(disk, "a")
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    await hot.close(clean=True)
    (disk / "a" / "index" / "data.mdb").write_bytes(b"noise" * 4096)
    victim = next(path for path in (disk / "a" / "objects").rglob("*") if path.is_file())
    victim.write_bytes(bytes(CHUNK_BYTES))
    hot = await opened(disk, "a")
    assert hot.index.health.recovered_count == len(FILES)
    assert "rebuilt" in hot.notices[0]
    cold.requests.clear()
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    assert cold.requests["read"] == 1
    await hot.close(clean=True)


async def test_an_index_that_was_removed_by_hand_leaves_no_files_that_nobody_knows_of(disk: Path, cold: MemoryCold) -> None:
    hot = await opened(disk, "a")
    async with mounted(hot, cold, disk) as mount:
        await read_all(mount)
    await hot.close(clean=True)
    for name in ("data.mdb", "objects.log", "clean"):
        (disk / "a" / "index" / name).unlink()

    hot = await opened(disk, "a")
    assert hot.sweep
    async with mounted(hot, cold, disk) as mount:
        assert await mount.engine.holdings.sweep(0) == len(FILES)
    await hot.close(clean=True)


async def test_a_second_daemon_is_refused_and_a_failed_start_holds_nothing(disk: Path) -> None:
    hot = await opened(disk, "a")
    with pytest.raises(SetupError, match="in use"):
        await opened(disk, "b", "a")
    other = await opened(disk, "b")
    await other.close(clean=True)
    await hot.close(clean=True)
    again = await opened(disk, "a")
    await again.close(clean=True)


async def test_one_directory_twice_is_refused(disk: Path) -> None:
    with pytest.raises(SetupError):
        await opened(disk, "a", "a")


async def test_capacity_is_that_of_all_directories_together(disk: Path) -> None:
    hot = await opened(disk, "a", "b")
    assert [ledger.capacity_bytes for ledger in hot.ledgers] == [1 << 29, 1 << 29]
    await hot.close(clean=True)
    assert ledger_of(100).free_bytes == 100
