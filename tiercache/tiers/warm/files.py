"""Files of a warm target, by plain blocking calls: they run in threads that may be given up (`patience.py`).

A path is relative to the target, made of names of ours, and walked from a descriptor of the target's directory without
following a link anywhere: whoever may write to a shared target must not make us read or write elsewhere.

Each call opens the directory anew, so that one that is unmounted, replaced or comes back is seen at once. Nothing here ever makes
the target itself or its `drafts`: what lies under a mount point while nothing is mounted there has none, so that no
draft can begin in it. Where a file is missing, the marker is looked for: no marker, no target (`Vanished`, not NotHeld).

Every call raises OSError for what the file system says, and NotHeld, Damaged or Vanished for what it found.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Sequence

import msgspec
import xxhash

from tiercache.core.health import Usage
from tiercache.errors import Damaged, NotHeld
from tiercache.tiers.beneath import components, open_directory

MARKER = "tiercache-target.json"
DRAFTS = "drafts"
FIRST_PIECE_BYTES = 64 << 10  # timed apart from the rest: latency and rate
_IOV_COUNT = 1024  # of one writev(2)

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IRREGULAR = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENAMETOOLONG})
_WHOLE_BYTES = 1 << 20  # of one read(2) in `read_whole`

Buffer = bytes | bytearray | memoryview


class Vanished(Exception):
    """The directory is not there, or has no marker: it is not the target (any more)."""


class Found(msgspec.Struct, frozen=True):
    """What a directory holds under `name`. Names that are not UTF-8 have surrogate escapes."""

    name: str
    size_bytes: int
    mtime_seconds: float
    occupied_bytes: int
    is_regular: bool = True


class Timed(msgspec.Struct, frozen=True):
    """What was read, and the time that the first piece and the rest of it took."""

    data: bytearray
    first_seconds: float
    rest_seconds: float


class Descriptor:
    """Closed with the last reference: a thread that was given up still has one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def open_root(path: str) -> Descriptor:
    try:
        return Descriptor(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise Vanished("does not exist") from error
    except NotADirectoryError as error:
        raise Vanished("is not a directory") from error


def read(path: str, relative: str, offset: int, length: int, checksum: int | None) -> Timed:
    """Exactly `length` bytes from `offset`, with this xxh3-64 unless None."""
    root = open_root(path)
    began = time.monotonic()
    file = _open_file(root, relative)
    data = bytearray(length)
    view = memoryview(data)
    _fill(file, view[:FIRST_PIECE_BYTES], offset, relative)
    first = time.monotonic()
    _fill(file, view[FIRST_PIECE_BYTES:], offset + FIRST_PIECE_BYTES, relative)
    ended = time.monotonic()
    if checksum is not None and xxhash.xxh3_64_intdigest(data) != checksum:
        raise Damaged(f"{relative}: {length} bytes at {offset} are not what was written")
    return Timed(data, first - began, ended - first)


def read_whole(path: str, relative: str, limit_bytes: int) -> bytes:
    file = _open_file(open_root(path), relative)
    pieces: list[bytes] = []
    length = 0
    while piece := os.read(file.number, min(_WHOLE_BYTES, limit_bytes + 1 - length)):
        pieces.append(piece)
        length += len(piece)
        if length > limit_bytes:
            raise Damaged(f"{relative} has more than {limit_bytes} bytes")
    return b"".join(pieces)


def names(path: str, relative: str) -> list[str]:
    directory = _open_listed(path, relative)
    return [] if directory is None else os.listdir(directory.number)


def scan(path: str, relative: str) -> list[Found]:
    directory = _open_listed(path, relative)
    if directory is None:
        return []
    found = []
    for name in os.listdir(directory.number):
        try:
            about = os.stat(name, dir_fd=directory.number, follow_symlinks=False)
        except FileNotFoundError:
            continue
        is_regular = stat.S_ISREG(about.st_mode)
        found.append(Found(name, about.st_size, about.st_mtime_ns / 1e9, about.st_blocks * 512, is_regular))
    return found


def remove(path: str, relative: str) -> None:
    """Missing is fine."""
    root = open_root(path)
    *parents, name = _parts(relative)
    try:
        directory = Descriptor(open_directory(root.number, parents, os.O_PATH))
        os.unlink(name, dir_fd=directory.number)
    except (FileNotFoundError, NotADirectoryError):
        _require_marker(root)


def usage(path: str) -> Usage:
    root = open_root(path)
    _require_marker(root)
    return usage_of(root)


def usage_of(root: Descriptor) -> Usage:
    found = os.fstatvfs(root.number)
    return Usage(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def now_seconds(path: str) -> float:
    """The clock of the file system: the time that it gives to a new file."""
    return touch(open_root(path))


def touch(root: Descriptor) -> float:
    """Write a small file and remove it again; its time."""
    draft = DraftFile(root)
    try:
        draft.append([b"\0"])
        return os.fstat(draft.file.number).st_mtime_ns / 1e9
    finally:
        draft.unlink()


def put(path: str, relative: str, data: bytes) -> None:
    """A whole file, durable."""
    draft = DraftFile(open_root(path))
    try:
        draft.append([data])
        draft.commit(relative)
    except (OSError, Vanished):
        draft.unlink()
        raise


class DraftFile:
    """A new file in `drafts`, by a name that nobody else will use. Blocking, one call at a time."""

    def __init__(self, root: Descriptor) -> None:
        self._root = root
        self._name = uuid.uuid4().hex.encode()
        try:
            self._drafts = Descriptor(open_directory(root.number, [DRAFTS.encode()], os.O_PATH))
            self.file = Descriptor(os.open(self._name, _WRITE, 0o600, dir_fd=self._drafts.number))
        except FileNotFoundError as error:
            raise Vanished(f"there is no directory {DRAFTS}") from error

    def append(self, buffers: Sequence[Buffer]) -> None:
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while rest:
            count = os.writev(self.file.number, rest[:_IOV_COUNT])
            done = 0
            while done < len(rest) and count >= len(rest[done]):
                count -= len(rest[done])
                done += 1
            del rest[:done]
            if count:
                rest[0] = rest[0][count:]

    def commit(self, relative: str) -> None:
        """Durable under the name `relative`, in place of what may have it now."""
        *parents, name = _parts(relative)
        os.fsync(self.file.number)
        directory = _make_directories(self._root, parents)
        try:
            os.rename(self._name, name, src_dir_fd=self._drafts.number, dst_dir_fd=directory.number)
        except FileNotFoundError as error:
            _require_marker(self._root)
            raise OSError(errno.ESTALE, "the draft was removed by somebody") from error
        os.fsync(directory.number)

    def unlink(self) -> None:
        """As far as it can be done: what stays is collected later."""
        try:
            os.unlink(self._name, dir_fd=self._drafts.number)
        except OSError:
            return


def _parts(relative: str) -> tuple[bytes, ...]:
    parts = components(relative)
    assert parts is not None, relative
    return parts


def _open_file(root: Descriptor, relative: str) -> Descriptor:
    *parents, name = _parts(relative)
    try:
        directory = Descriptor(open_directory(root.number, parents, os.O_PATH))
        file = Descriptor(os.open(name, _READ, dir_fd=directory.number))
    except FileNotFoundError as error:
        _require_marker(root)
        raise NotHeld(f"there is no {relative}") from error
    except OSError as error:
        if error.errno in _IRREGULAR:
            raise Damaged(f"{relative} is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(file.number).st_mode):
        raise Damaged(f"{relative} is not a regular file")
    return file


def _open_listed(path: str, relative: str) -> Descriptor | None:
    """The directory, None when there is none (or something else in its place)."""
    root = open_root(path)
    try:
        return Descriptor(open_directory(root.number, _parts(relative) if relative else ()))
    except (FileNotFoundError, NotADirectoryError):
        _require_marker(root)
        return None


def _require_marker(root: Descriptor) -> None:
    try:
        os.stat(MARKER, dir_fd=root.number, follow_symlinks=False)
    except FileNotFoundError as error:
        raise Vanished(f"there is no {MARKER}") from error


def _fill(file: Descriptor, view: memoryview, offset: int, relative: str) -> None:
    while len(view):
        count = os.preadv(file.number, [view], offset)
        if count == 0:
            raise Damaged(f"{relative} ends before byte {offset + len(view)}")
        view = view[count:]
        offset += count


def _make_directories(root: Descriptor, parents: Sequence[bytes]) -> Descriptor:
    """The directory at `parents`, open for fsync, with those made that are missing; each of them durable in its parent."""
    at = Descriptor(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root.number))
    for part in parents:
        try:
            below = _open_below(at, part)
        except FileNotFoundError:
            _make_directory(at, part)
            below = _open_below(at, part)
        at = below
    return at


def _make_directory(at: Descriptor, part: bytes) -> None:
    try:
        os.mkdir(part, 0o700, dir_fd=at.number)
    except FileExistsError:
        return  # by another node, which may not have synced it yet
    finally:
        os.fsync(at.number)


def _open_below(at: Descriptor, part: bytes) -> Descriptor:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return Descriptor(os.open(part, flags, dir_fd=at.number))
