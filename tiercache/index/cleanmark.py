"""The clean mark: a small file beside the index that says "stopped in order, and the index file looked like this".

It says which file it vouches for (inode, size, mtime, ctime, last transaction), so that damage and exchange while nothing
ran are noticed before a single page of the index is believed, without reading it: a clean start costs one stat. A copy
with the old size and mtime has another inode, and a file that was written to and given its old mtime another
ctime: neither can be set. Whatever does not fit is a stranger, whose word about the hot files is not taken. The mark is
written last, after everything else is on the disk, and removed (durably) before the index is opened for
writing. A page that changes without any of this is the disk's own bit rot: the record checksums find that one, later.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tiercache.index.compaction import sync_directory

MARK_NAME = "clean"


class CleanMark(msgspec.Struct, frozen=True):
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    transaction: int

    def describes(self, data: Path) -> bool:
        """Raises OSError."""
        return _mark_of(data, self.transaction) == self


def _mark_of(data: Path, transaction: int) -> CleanMark:
    status = data.stat()
    return CleanMark(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, transaction)


def write_mark(directory: Path, data: Path, transaction: int) -> None:
    """Raises OSError."""
    mark = _mark_of(data, transaction)
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
