"""Seeds of the reference model. What a seed once found has a test of its own beside the part that was wrong."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.reference.homes import DiskHome, MakeHome, MemoryHome
from tests.reference.model import CAPACITY_BYTES, Model
from tiercache.engine import fill, holdings

log = logging.getLogger(__name__)

STEPS = 80
SOAK_STEPS = 400
HANGS_SECONDS = 120.0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on a disk; small limits, so that small objects meet what large ones do."""
    monkeypatch.setattr(holdings, "RETIRE_SECONDS", 0.0)
    monkeypatch.setattr(fill, "VERIFIED_BYTES", 100_000)
    monkeypatch.setattr(fill, "MEMORY_BYTES", 8 * 64 * 1024)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


async def play(make: MakeHome, disk: Path, monkeypatch: pytest.MonkeyPatch, seed: int, steps_count: int) -> None:
    model = Model(make(disk, CAPACITY_BYTES, monkeypatch), disk, seed)
    try:
        with trio.fail_after(HANGS_SECONDS):
            await model.run(steps_count)
    except BaseException:
        log.error("seed %d:\n  %s", seed, "\n  ".join(model.steps))
        raise


@pytest.mark.parametrize("seed", range(24))
async def test_the_engine_agrees_with_the_model(disk: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    await play(MemoryHome, disk, monkeypatch, seed, STEPS)


@pytest.mark.parametrize("seed", range(100, 104))
async def test_the_engine_on_the_real_index_agrees_with_the_model(disk: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    await play(DiskHome, disk, monkeypatch, seed, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1200))
async def test_the_engine_agrees_with_the_model_for_long(disk: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    await play(MemoryHome, disk, monkeypatch, seed, SOAK_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2000, 2040))
async def test_the_engine_on_the_real_index_agrees_with_the_model_for_long(
    disk: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    await play(DiskHome, disk, monkeypatch, seed, SOAK_STEPS)
