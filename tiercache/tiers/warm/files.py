"""Files of a warm target, by plain blocking calls: they run in threads that may be given up (`patience.py`).

A path is relative to the target, made of names of ours, and walked from a descriptor of the target's directory without
following a link anywhere: whoever may write to a shared target must not make us read or write elsewhere.

Each call opens the directory anew, so that one that is unmounted, replaced or comes back is seen at once. Nothing here ever makes
the target itself or its `drafts`: what lies under a mount point while nothing is mounted there has neither, so
that no draft can begin in it. Where a file is missing, the marker is looked for: no marker, no target (`Vanished`, not NotHeld).

Closing can hang as well (FUSE and NFS flush). So descriptors are closed by the thread that opened them, or another of the
target's, and never with the last reference, which may be dropped on the event loop.

Every call raises OSError for what the file system says, and NotHeld, Damaged, Blocked or Vanished for what it found.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import xxhash

from tiercache.core.health import Usage
from tiercache.errors import Damaged, NotHeld
from tiercache.tiers.beneath import components, open_directory
from tiercache.tiers.warm.loans import LOANS

MARKER = "tiercache-target.json"
DRAFTS = "drafts"
OURS = frozenset({"manifests", "packs", "shards", DRAFTS})
"""What lies in a target besides its marker."""
FIRST_PIECE_BYTES = 64 << 10  # timed apart from the rest: latency and rate
_WRITE_BYTES = 1 << 20  # of one writev(2), see `WRITE_BYTES` in tiers/sink.py
_IOV_COUNT = 1024
_BEGUN_BYTES = 256 << 10  # an append of so much is begun to be written to the disk at once

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IRREGULAR = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENAMETOOLONG})
_WHOLE_BYTES = 1 << 20  # of one read(2) in `read_whole`

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

Buffer = bytes | bytearray | memoryview


class Vanished(Exception):
    """The directory is not there, or has no marker: it is not the target (any more)."""


class Blocked(Exception):
    """Something that is not ours lies where a file of ours would go, or somebody has removed the draft."""


class Found(msgspec.Struct, frozen=True):
    """What a directory holds under `name`. Names that are not UTF-8 have surrogate escapes."""

    name: str
    size_bytes: int
    mtime_seconds: float
    occupied_bytes: int
    is_regular: bool = True


class Timed(msgspec.Struct, frozen=True):
    """What was read, and the time that the first piece and the rest of it took."""

    data: memoryview
    first_seconds: float
    rest_seconds: float


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_root(path: str) -> int:
    """An O_PATH descriptor of the target."""
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Vanished("does not exist") from error
    except NotADirectoryError as error:
        raise Vanished("is not a directory") from error


def read(path: str, relative: str, offset: int, length: int, checksum: int | None) -> Timed:
    """Exactly `length` bytes from `offset`, with this xxh3-64 unless None."""
    with opened(open_root(path)) as root:
        began = time.monotonic()
        with opened(_open_file(root, relative)) as file:
            if length > FIRST_PIECE_BYTES:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # WILLNEED fetches single pages, at twice the CPU (6.18)
            data = LOANS.take(length)
            _fill(file, data[:FIRST_PIECE_BYTES], offset, relative)
            first = time.monotonic()
            _fill(file, data[FIRST_PIECE_BYTES:], offset + FIRST_PIECE_BYTES, relative)
            ended = time.monotonic()
    if checksum is not None and xxhash.xxh3_64_intdigest(data) != checksum:
        raise Damaged(f"{relative}: {length} bytes at {offset} are not what was written")
    return Timed(data, first - began, ended - first)


def read_whole(path: str, relative: str, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    length = 0
    with opened(open_root(path)) as root, opened(_open_file(root, relative)) as file:
        while piece := os.read(file, min(_WHOLE_BYTES, limit_bytes + 1 - length)):
            pieces.append(piece)
            length += len(piece)
            if length > limit_bytes:
                raise Damaged(f"{relative} has more than {limit_bytes} bytes")
    return b"".join(pieces)


def names(path: str, relative: str) -> list[str]:
    """Nothing when there is no such directory, or something else in its place."""
    with _listed(path, relative) as directory:
        return [] if directory is None else os.listdir(directory)


def scan(path: str, relative: str) -> list[Found]:
    with _listed(path, relative) as directory:
        return [] if directory is None else [found for name in os.listdir(directory) for found in _looked_at(directory, name)]


def remove(path: str, relative: str) -> None:
    """Missing is fine."""
    *parents, name = _parts(relative)
    with opened(open_root(path)) as root:
        try:
            with opened(open_directory(root, parents, os.O_PATH)) as directory:
                os.unlink(name, dir_fd=directory)
        except (FileNotFoundError, NotADirectoryError):
            _require_marker(root)
        except IsADirectoryError as error:
            raise Blocked(f"{relative} is not a regular file") from error


def usage(path: str) -> Usage:
    with opened(open_root(path)) as root:
        _require_marker(root)
        return usage_of(root)


def usage_of(root: int) -> Usage:
    found = os.fstatvfs(root)
    return Usage(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def now_seconds(path: str) -> float:
    """The clock of the file system: the time that it gives to a file that is written. Leaves nothing behind."""
    draft = DraftFile(path)
    try:
        draft.begin()
        draft.append([b"\0"])
        return draft.mtime_seconds()
    finally:
        draft.discard()


def put(path: str, relative: str, data: bytes) -> None:
    """A whole file, durable."""
    draft = DraftFile(path)
    draft.begin()
    draft.append([data])
    draft.commit(relative)


def sync_directory(directory: int) -> None:
    """Where directories cannot be synced, their entries are taken to be durable."""
    with opened(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)) as listed:
        try:
            os.fsync(listed)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


class DraftFile:
    """A new file in `drafts`, by a name that nobody else uses. Blocking, one call at a time, each in some thread.

    A call that fails discards the draft. One that was given up does so when it comes back, and one that has not begun by then
    does nothing. Only a draft that is given up between two calls has to be discarded by another call (`give_up` tells).
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._name = uuid.uuid4().hex.encode()
        self._open = ExitStack()
        self._root = self._drafts = self._file = -1
        self._appended_bytes = 0
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_given_up = False

    def begin(self) -> None:
        with self._work():
            self._root = self._open.enter_context(opened(open_root(self._path)))
            _require_marker(self._root)
            try:
                drafts = open_directory(self._root, [DRAFTS.encode()], os.O_PATH)
                self._drafts = self._open.enter_context(opened(drafts))
                self._file = self._open.enter_context(opened(os.open(self._name, _WRITE, 0o600, dir_fd=drafts)))
            except FileNotFoundError as error:
                raise Vanished(f"there is no directory {DRAFTS}") from error

    def append(self, buffers: Sequence[Buffer]) -> None:
        with self._work():
            begin = self._appended_bytes
            for views in _writes(buffers):
                self._write(views)
            if self._appended_bytes - begin >= _BEGUN_BYTES:
                _begin_write_back(self._file, begin, self._appended_bytes - begin)

    def _write(self, rest: list[memoryview]) -> None:
        while rest:
            count = os.writev(self._file, rest)
            self._appended_bytes += count
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
        with self._work():
            with _made_directory(self._root, parents, relative) as directory:
                os.fsync(self._file)
                if self._is_given_up:
                    raise Blocked("the draft was given up")
                try:
                    os.rename(self._name, name, src_dir_fd=self._drafts, dst_dir_fd=directory)
                except FileNotFoundError as error:
                    _require_marker(self._root)
                    raise Blocked("the draft was removed by somebody") from error
                except IsADirectoryError as error:
                    raise Blocked(f"{relative} is a directory") from error
                sync_directory(directory)
            self._file = self._root = -1
            self._open.close()

    def mtime_seconds(self) -> float:
        return os.fstat(self._file).st_mtime_ns / 1e9

    def discard(self) -> None:
        """Remove it as far as that can be done: what stays is collected later. Idempotent."""
        if self._file >= 0:
            self._file = -1
            with suppress(OSError):
                os.unlink(self._name, dir_fd=self._drafts)
        self._root = -1
        with suppress(OSError):
            self._open.close()

    def give_up(self) -> bool:
        """Nobody wants it any more. True: no call is under way, and somebody has to `discard` it in a thread."""
        with self._lock:
            self._is_given_up = True
            return not self._is_busy and self._root >= 0

    @contextmanager
    def _work(self) -> Iterator[None]:
        with self._lock:
            if self._is_given_up:
                raise Blocked("the draft was given up")
            self._is_busy = True
        try:
            yield
        except (OSError, Vanished, Blocked):
            self.discard()
            raise
        finally:
            with self._lock:
                self._is_busy = False
                is_unwanted = self._is_given_up
            if is_unwanted:
                self.discard()


def _writes(buffers: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """The buffers, cut and put together to what one writev(2) takes."""
    views: list[memoryview] = []
    length = 0
    for view in (memoryview(buffer).cast("B") for buffer in buffers):
        for begin in range(0, len(view), _WRITE_BYTES):
            part = view[begin : begin + _WRITE_BYTES]
            if views and (length + len(part) > _WRITE_BYTES or len(views) == _IOV_COUNT):
                yield views
                views, length = [], 0
            views.append(part)
            length += len(part)
    if views:
        yield views


def _begin_write_back(file: int, begin: int, length: int) -> None:
    """Have the kernel write these bytes to the disk from now on, instead of all of the file in the fsync at its end.

    Whether that went well, the fsync tells. (posix_fadvise would begin it too, but then it waits for every core's page lists.)
    """
    if _sync_file_range is not None:
        _sync_file_range(file, begin, length, _SYNC_FILE_RANGE_WRITE)


def _parts(relative: str) -> tuple[bytes, ...]:
    parts = components(relative)
    assert parts is not None, relative
    return parts


def _open_file(root: int, relative: str) -> int:
    *parents, name = _parts(relative)
    try:
        with opened(open_directory(root, parents, os.O_PATH)) as directory:
            file = os.open(name, _READ, dir_fd=directory)
    except FileNotFoundError as error:
        _require_marker(root)
        raise NotHeld(f"there is no {relative}") from error
    except OSError as error:
        if error.errno in _IRREGULAR:
            raise Damaged(f"{relative} is not a regular file") from error
        raise
    try:
        is_regular = stat.S_ISREG(os.fstat(file).st_mode)
    except OSError:
        os.close(file)
        raise
    if not is_regular:
        os.close(file)
        raise Damaged(f"{relative} is not a regular file")
    return file


@contextmanager
def _listed(path: str, relative: str) -> Iterator[int | None]:
    with opened(open_root(path)) as root:
        try:
            directory = open_directory(root, _parts(relative) if relative else ())
        except (FileNotFoundError, NotADirectoryError):
            _require_marker(root)
            yield None
        else:
            with opened(directory):
                yield directory


def _looked_at(directory: int, name: str) -> Iterator[Found]:
    """One, or none when it has gone meanwhile."""
    with suppress(FileNotFoundError):
        about = os.stat(name, dir_fd=directory, follow_symlinks=False)
        yield Found(name, about.st_size, about.st_mtime_ns / 1e9, about.st_blocks * 512, stat.S_ISREG(about.st_mode))


def _require_marker(root: int) -> None:
    try:
        os.stat(MARKER, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError as error:
        raise Vanished(f"has no {MARKER}") from error


def _fill(file: int, view: memoryview, offset: int, relative: str) -> None:
    while len(view):
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise Damaged(f"{relative} ends before byte {offset + len(view)}")
        view = view[count:]
        offset += count


@contextmanager
def _made_directory(root: int, parents: Sequence[bytes], relative: str) -> Iterator[int]:
    """The directory at `parents`, with those made that are missing; each of them is durable in its parent."""
    with ExitStack() as stack:
        at = root
        for part in parents:
            try:
                below = _open_below(at, part)
            except FileNotFoundError:
                _make_directory(at, part)
                below = _open_below(at, part)
            except NotADirectoryError as error:
                raise Blocked(f"what should be the directory of {relative} is none") from error
            at = stack.enter_context(opened(below))
        yield at


def _make_directory(at: int, part: bytes) -> None:
    with suppress(FileExistsError):  # by another node, which may not have synced it yet
        os.mkdir(part, 0o700, dir_fd=at)
    sync_directory(at)


def _open_below(at: int, part: bytes) -> int:
    return os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
