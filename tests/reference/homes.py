"""Where a cache lives in the model, and what it is found like after it was closed, killed, or went down with its machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from tests.engine.engines import KIB, Lagging, ledger_of
from tests.engine.faults import FailingDisk, failing_disk
from tiercache.config import HotSettings
from tiercache.engine import hotset
from tiercache.engine.hotset import HotSet, open_hot
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.hot import HotDirectory
from tiercache.tiers.space import Ledger


class Home(Protocol):
    async def open(self) -> tuple[Lagging, FailingDisk, Ledger]:
        """The cache as the next process finds it."""

    async def close(self, *, clean: bool) -> None:
        """`clean`: in order. Else the process was killed; what it had not committed yet is lost if the caller has said so."""

    def reboot(self) -> None:
        """The machine goes down after a `close` that was not clean, and comes up with another boot id."""


class MemoryHome:
    """The index in memory: quick, for many seeds."""

    def __init__(self, home: Path, capacity_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._capacity_bytes = capacity_bytes
        self._disk = failing_disk(home, monkeypatch)
        self._index = MemoryIndex()

    async def open(self) -> tuple[Lagging, FailingDisk, Ledger]:
        return Lagging(self._index), self._disk, ledger_of(self._capacity_bytes, self._index.held_bytes(0))

    async def close(self, *, clean: bool) -> None:
        self._index = self._index.reopened(other_boot=False)

    def reboot(self) -> None:
        self._index = self._index.reopened(other_boot=True)


class DiskHome:
    """Everything as the daemon has it: claim, LMDB, clean mark, boot id."""

    def __init__(self, home: Path, capacity_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._settings = HotSettings(
            paths=(str(home / "hot0"),), capacity_bytes=capacity_bytes, min_free_bytes=0, chunk_bytes=64 * KIB
        )
        self._mountpoint = str(home / "mnt")
        self._monkeypatch = monkeypatch
        self._boot = home / "boot_id"
        self._boots = 0
        self._boot.write_text("boot 0\n")
        self._set: HotSet | None = None
        self._disk: FailingDisk | None = None
        monkeypatch.setattr(hotset, "BOOT_ID", self._boot)

    async def open(self) -> tuple[Lagging, FailingDisk, Ledger]:
        self._set = await open_hot(self._settings, self._mountpoint, [])
        if self._disk is None:
            self._disk = FailingDisk(self._set.files.directories)
            self._disk.attach(self._monkeypatch)
        else:
            self._disk.directories = (HotDirectory(0, self._set.files.directories[0].path),)
        return Lagging(self._set.index), self._disk, self._set.ledgers[0]

    async def close(self, *, clean: bool) -> None:
        assert self._set is not None
        await self._set.close(clean=clean)

    def reboot(self) -> None:
        self._boots += 1
        self._boot.write_text(f"boot {self._boots}\n")


MakeHome = Callable[[Path, int, pytest.MonkeyPatch], Home]


def spoil(home: Path, rng: random.Random) -> None:
    """What a machine that went down may leave of a hot file: a page of zeros or of noise, a wrong size, nothing at all."""
    paths = sorted(path for path in (home / "hot0" / "objects").rglob("*") if path.is_file())
    for path in rng.sample(paths, min(len(paths), 3)):
        size_bytes = path.stat().st_size
        kind = rng.randrange(5)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            with path.open("r+b") as file:
                file.truncate(rng.randrange(size_bytes + 5000))
        else:
            with path.open("r+b") as file:
                file.seek(rng.randrange(size_bytes) // 4096 * 4096)
                noise = bytes(4096) if kind == 2 else rng.randbytes(4096)
                file.write(noise[: size_bytes - file.tell()])
