"""The clean mark: a small file beside the index that says "stopped in order, and the index file looked like this".

It holds size, mtime and last transaction of the index file, so that damage done while nothing ran is noticed before a
single page of the index is believed, without reading it: a clean start costs one stat. It is written last, after
everything else is on the disk, and removed (durably) before the index is opened for writing. A page that changes
without size or mtime is the disk's own bit rot: the record checksums find that one, later.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tiercache.index.compaction import sync_directory

MARK_NAME = "clean"


class CleanMark(msgspec.Struct, frozen=True):
    size_bytes: int
    mtime_ns: int
    transaction: int

    def describes(self, data: Path) -> bool:
        """Raises OSError."""
        status = data.stat()
        return (status.st_size, status.st_mtime_ns) == (self.size_bytes, self.mtime_ns)


def write_mark(directory: Path, data: Path, transaction: int) -> None:
    """Raises OSError."""
    status = data.stat()
    mark = CleanMark(status.st_size, status.st_mtime_ns, transaction)
    temporary = directory / f"{MARK_NAME}.new"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(mark))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / MARK_NAME)
    sync_directory(directory)


def read_mark(directory: Path) -> CleanMark | None:
    """None when there is none, or it is no mark: both mean that nothing is known. Raises OSError."""
    try:
        return msgspec.json.decode((directory / MARK_NAME).read_bytes(), type=CleanMark)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def remove_mark(directory: Path) -> None:
    """Raises OSError."""
    try:
        (directory / MARK_NAME).unlink()
    except FileNotFoundError:
        return
    sync_directory(directory)
