"""Hot disks that fail when a test says so: in the calls of `HotTier`, and in the reads and writes of the files themselves."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tiercache.core.record import ObjectId
from tiercache.engine import disks, fill, reader
from tiercache.tiers import hot, sink
from tiercache.tiers.hot import HotDirectory, HotFile, HotTier, refusal


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "no space")


def broken() -> OSError:
    return OSError(errno.EIO, "broken")


Trouble = Callable[[], OSError] | None


class FailingDisk(HotTier):
    """A hot tier with one switch for each kind of operation; `None` is a healthy one.

    `hold` makes `open` and `filesystem` hang until `go_on` is set. Tests must set it, or the interpreter waits for the threads.
    """

    def __init__(self, directories: Sequence[HotDirectory]) -> None:
        super().__init__(directories)
        self.writing: Trouble = None
        self.reading: Trouble = None
        self.opening: Trouble = None
        self.unlinking: Trouble = None
        self.syncing: Trouble = None
        self.hold = False
        self.go_on = threading.Event()

    def open(self, object_id: ObjectId, size_bytes: int, directory: int) -> HotFile:
        self._hang()
        if (trouble := self.opening) is not None:
            raise refusal(trouble(), "open", "a hot file")
        return super().open(object_id, size_bytes, directory)

    def filesystem(self, directory: int) -> hot.Filesystem:
        self._hang()
        return super().filesystem(directory)

    def unlink(self, object_id: ObjectId, directory: int) -> None:
        if (trouble := self.unlinking) is not None:
            raise refusal(trouble(), "unlink", "a hot file")
        super().unlink(object_id, directory)

    def syncfs(self, directory: int) -> None:
        if (trouble := self.syncing) is not None:
            raise refusal(trouble(), "sync", "a hot directory")

    def _hang(self) -> None:
        if self.hold:
            assert self.go_on.wait(30.0), "the test forgot to let the disk go on"

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the reads and writes of files obey `reading` and `writing`."""
        write, pread, resident, digest = sink._write, hot.read, hot.read_resident, hot.hash_range

        def failing_write(file: HotFile, piece: memoryview, offset: int) -> None:
            if (trouble := self.writing) is not None:
                raise refusal(trouble(), "write", file.path)
            write(file, piece, offset)

        def check(file: HotFile) -> None:
            if (trouble := self.reading) is not None:
                raise refusal(trouble(), "read", file.path)

        def failing_read(file: HotFile, offset: int, length: int) -> bytes:
            check(file)
            return pread(file, offset, length)

        def failing_resident(file: HotFile, offset: int, length: int) -> bytes | None:
            check(file)
            return resident(file, offset, length)

        def failing_hash(file: HotFile, offset: int, length: int) -> int:
            check(file)
            return digest(file, offset, length)

        monkeypatch.setattr(sink, "_write", failing_write)
        monkeypatch.setattr(disks, "read", failing_read)
        monkeypatch.setattr(disks, "read_resident", failing_resident)
        for module in (fill, reader):
            monkeypatch.setattr(module, "hash_range", failing_hash)


def failing_disk(home: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> FailingDisk:
    directories = []
    for position in range(count):
        path = home / f"hot{position}"
        path.mkdir(exist_ok=True)
        directories.append(HotDirectory(position, path))
    disk = FailingDisk(directories)
    disk.attach(monkeypatch)
    return disk
