"""Scrub: bit rot under whole hot files is found on the disk itself, and mended in place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.engine.engines import CHUNK_BYTES, content, engine_on, limits, until
from tiercache.engine.progress import ScrubProgress
from tiercache.tiers.memory import MemoryCold

FAST = dataclasses.replace(limits(), scrub_bytes=1 << 40)
BODY = content(1, 5 * CHUNK_BYTES + 4097)


@pytest.fixture
def cold() -> MemoryCold:
    cold = MemoryCold()
    cold.put("file", BODY)
    return cold


def hot_file(home: Path) -> Path:
    (path,) = [path for path in home.rglob("*") if path.is_file()]
    return path


def flip_a_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


async def test_a_flipped_bit_is_found_and_fetched_again(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=FAST) as mount:
        assert await mount.cat("file") == BODY
        await mount.settled()
        record = mount.engine.index.hot(cold.ref("file").object_id)
        assert record is not None
        assert await mount.engine.scrub.look_at(record)
        path = hot_file(tmp_path)
        before = path.stat().st_ino
        flip_a_bit(path, 3 * CHUNK_BYTES + 5)
        assert not await mount.engine.scrub.look_at(record)
        assert mount.counted("tiercache_verify_failures_total") == 1
        assert await mount.cat("file") == BODY
        await mount.settled()
        assert path.read_bytes() == BODY
        assert path.stat().st_ino == before, "who has it open would go on reading the damage"
        record = mount.engine.index.hot(cold.ref("file").object_id)
        assert record is not None
        assert await mount.engine.scrub.look_at(record)


async def test_it_runs_by_itself_when_it_may(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, numbers=FAST) as mount:
        await mount.cat("file")
        mount.engine.start()
        await until(lambda: mount.counted("tiercache_scrubbed_bytes_total") >= len(BODY))
        assert mount.counted("tiercache_verify_failures_total") == 0


async def test_a_pass_on_demand_looks_at_everything_once(tmp_path: Path, cold: MemoryCold) -> None:
    cold.put("good", content(2, 1000))
    async with engine_on(tmp_path, cold, numbers=dataclasses.replace(limits(), scrub_bytes=0)) as mount:
        await mount.cat("file")
        await mount.settled()
        flip_a_bit(hot_file(tmp_path), 3 * CHUNK_BYTES + 5)
        await mount.cat("good")
        await mount.settled()
        progress = ScrubProgress()
        await mount.engine.scrub.pass_over(progress, "{}/{}".format)
        assert (progress.total_count, progress.done_count) == (2, 2)
        assert (progress.damaged_count, progress.repaired_count, progress.failures.count) == (1, 1, 0)
        assert progress.lines == ["data/file: damaged on the disk, dropped and fetched again"]
        assert await mount.cat("file") == BODY
        await mount.settled()
        again = ScrubProgress()
        await mount.engine.scrub.pass_over(again, "{}/{}".format)
        assert (again.done_count, again.damaged_count) == (2, 0)
