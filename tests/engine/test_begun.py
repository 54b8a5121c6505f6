"""Small objects that are filled without a task (`tiers/begun.py`): the same outcome as by a task, whatever happens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.engine import engines
from tests.engine.engines import CHUNK_BYTES, KIB, Mounted, content, engine_on
from tests.engine.faults import Trouble, broken, failing_disk, no_space
from tests.engine.test_fill import assert_settled
from tests.tiers.beginning import Beginning
from tiercache.core.backoff import Backoff
from tiercache.engine.dataset import Dataset
from tiercache.errors import Unavailable, VersionChanged
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.retrying import Retrying
from tiercache.tiers.tier import Cold

DATA = content(1, 100 * KIB)


class Rig:
    """An engine over a store that offers `begin`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *faults: Fault, deaf: bool = False) -> None:
        self.memory = MemoryCold()
        self.memory.put("small", DATA)
        self.below = Beginning(Faulty(self.memory, Script(*faults)), deaf=deaf)
        self.retries = 0
        monkeypatch.setattr(engines, "dataset_on", self._dataset)

    def _dataset(self, cold: Cold, *, replica: object = None, ttl_seconds: float = 60.0) -> Dataset:
        policy = Backoff(first_seconds=0.01, ceiling_seconds=0.02, deadline_seconds=5.0)
        retrying = Retrying(cold, policy, rng=random.Random(1), on_retry=self._retried)
        return Dataset(engines.DATASET, retrying, retrying, "", ttl_seconds)

    def _retried(self, _operation: str, _error: Exception) -> None:
        self.retries += 1

    @asynccontextmanager
    async def mounted(self, home: Path) -> AsyncIterator[Mounted]:
        async with engine_on(home, self.below) as mount:
            yield mount


async def test_small_file_is_filled_without_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    async with rig.mounted(tmp_path) as mount:
        assert await mount.cat("small") == DATA
        await mount.settled()
        assert_settled(mount)
        assert await mount.cat("small") == DATA
        assert rig.below.begun_count == 1
        assert rig.memory.sent_bytes == len(DATA)


async def test_readers_at_once_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)

    async def read(mount: Mounted) -> None:
        assert await mount.cat("small") == DATA

    async with rig.mounted(tmp_path) as mount, trio.open_nursery() as readers:
        for _ in range(8):
            readers.start_soon(read, mount)
    assert rig.memory.sent_bytes == len(DATA)


async def test_object_of_several_chunks_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.memory.put("two", content(2, CHUNK_BYTES + 1))
    async with rig.mounted(tmp_path) as mount:
        assert await mount.cat("two") == content(2, CHUNK_BYTES + 1)
    assert rig.below.begun_count == 0


async def test_failure_is_tried_again_in_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, *[Fault("read", error=lambda: Unavailable("lost"))] * 3)
    async with rig.mounted(tmp_path) as mount:
        assert await mount.cat("small") == DATA
        await mount.settled()
        assert_settled(mount)
    assert (rig.below.begun_count, rig.retries) == (1, 3)


async def test_changed_object_is_stale_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, Fault("read", error=lambda: VersionChanged("changed")))
    async with rig.mounted(tmp_path) as mount:
        with pytest.raises(VersionChanged):
            await mount.open("small")
        await mount.settled()
        assert_settled(mount)
        assert await mount.cat("small") == DATA


@pytest.mark.parametrize("trouble", [no_space, broken])
async def test_disk_that_refuses_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Trouble) -> None:
    rig = Rig(monkeypatch)
    disk = failing_disk(tmp_path, monkeypatch)
    async with engine_on(tmp_path, rig.below, files=disk) as mount:
        disk.writing = trouble
        assert await mount.cat("small") == DATA
        await mount.settled()
        assert_settled(mount)
        assert mount.engine.holdings.disks.is_sick(0) == (trouble is broken)
    assert rig.below.begun_count == 1


@pytest.mark.parametrize("deaf", [False, True])
async def test_end_of_the_engine_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, deaf: bool
) -> None:
    rig = Rig(monkeypatch, Fault("read", delay_seconds=60.0), deaf=deaf)
    async with rig.mounted(tmp_path) as mount:
        entry = await mount.entry("small")
        held = await mount.engine.holdings.acquire(entry.ref)
        fill = mount.engine.filler.start(held, 0, 0)
        await wait_all_tasks_blocked()
        assert mount.engine.filler.running_count == 1
        before = trio.current_time()
    assert mount.engine.filler.running_count == 0
    assert mount.ledger.reserved_bytes == 0
    assert fill.error is not None
    assert trio.current_time() - before < 2.0
