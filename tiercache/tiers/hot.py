"""The files of the hot tier.

One object is one sparse file `<hot directory>/objects/<2 hex>/<40 hex>`, named by its ObjectId, with
exactly the object's size from the start and no header: a byte's place in the file is its place in the
object, so that the kernel may one day read the file without us. Which chunks of it are filled is
the index's knowledge, not the file's. A file is never truncated or punched; eviction unlinks it whole,
and what is filled again gets a new inode (an old descriptor can never reach the new bytes).

Everything here that touches the disk blocks, and is called in threads; `read_resident` and the sinks'
`close` are the exceptions, made for the event loop.

Ownership. A thread may be abandoned inside a system call of a hanging disk. So nothing here is closed
by hand: descriptors (`HotFile.fd`, the one of a `HotDirectory`) are closed when the last reference goes,
and the thread's own reference keeps its number from being reused under it. Memory that a sink has lent
goes back to the pool only from `advance`, that is from the thread that used it; a loan that was
abandoned is left to the garbage collector. Close errors are ignored: write-back errors are reported by
`syncfs`.

Errors become two classes. HotFull: the disk or the process has no room for more (ENOSPC, EDQUOT, EFBIG, EMFILE,
ENFILE, ENOMEM): overload, not death. HotSick: anything else. Both mean that the reader is served past the hot tier.

Directories are held by descriptor: a cache disk that is lazily unmounted under a running daemon makes
errors instead of filling the file system below its mount point.

Write-back errors. `syncfs` reports a failed write-back once for each open description (Linux 5.8 and later),
counted from the moment it was opened. Hence the one long-lived descriptor for each directory: an error between
two calls cannot be missed. After HotSick from `syncfs` the next call may succeed although
bytes were lost: drop what was completed since the last good one.

Rejected: receiving into a shared mapping of the file (saves one copy, but a full disk is then a SIGBUS);
O_DIRECT (the bytes that were just filled are the ones that are read next: they belong in the page cache);
hashing a mapping (the same SIGBUS).

Measured (2 noisy cores of 2 GHz class, ext4): a sink fills new 8 MiB chunks at 1.4 GB/s in pieces of 16 KiB, 2.5 in 64 KiB,
3.1 in 256 KiB to 1 MiB; read and xxh3 of a cached 8 MiB chunk 0.25-0.6 ms (1 MiB pieces; 128 KiB pieces and one piece
are slower), xxh3 alone 14 us a MiB, without the GIL; `read_resident` 1.5 us for 4 KiB, 7-14 us for 128 KiB (a plain
`pread` 0.8 and 4-9); create 36 us, open 14, unlink 16, walk 8 us a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from tiercache.core.record import OBJECT_ID_BYTES, ObjectId
from tiercache.errors import HotFull, HotSick, NotHeld

PIECE_BYTES = 1 << 20

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_CREATE_ATTEMPTS = 4  # open; its directory is missing, open; a leftover is in the way, open; once more for a race

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]
_libc.syncfs.restype = ctypes.c_int


def refusal(error: OSError, doing: str, path: str) -> HotFull | HotSick:
    reason = os.strerror(error.errno) if error.errno else str(error)
    message = f"cannot {doing} {path}: {reason}"
    if error.errno in _TOO_MANY_FILES:
        return HotFull(message, hint="raise the limit of open files (ulimit -n, LimitNOFILE=)")
    if error.errno in _NO_ROOM:
        return HotFull(message, hint="free space on this file system or give the hot tier a smaller capacity")
    return HotSick(message, hint="check the disk (kernel log, mount options); reads go on without it")


class Filesystem(msgspec.Struct, frozen=True):
    """What `statvfs` says: `free_bytes` is what an ordinary user may still take (without root's reserve)."""

    free_bytes: int
    total_bytes: int


class HotDirectory:
    """One hot directory, by the position that records name it by. Opening it blocks and makes `objects/`.

    Raises HotFull, HotSick. `block_bytes` is the allocation unit of its file system.
    """

    def __init__(self, position: int, path: Path) -> None:
        self.position = position
        self.path = path
        objects = path / "objects"
        try:
            with contextlib.suppress(FileExistsError):
                objects.mkdir(0o700)
            self.fd = os.open(objects, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            self.block_bytes = os.fstatvfs(self.fd).f_frsize
        except OSError as error:
            raise refusal(error, "open", str(objects)) from error

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "fd"):
            with contextlib.suppress(OSError):
                close(self.fd)


class HotFile:
    """A file of the hot tier. It owns `fd`, which is closed when the last reference goes.

    Whoever hands `fd` to a thread or to the kernel keeps a reference to this object until that has let go of it. A file that
    was begun has no descriptor (-1) before `ensure`: the thread that brings the first byte makes it, which saves every
    small file a thread of its own, and an object that turns out not to exist leaves nothing behind. A thread that needs
    no Python makes it by itself, as `birth` says, and its descriptor is taken over by `adopt`.
    """

    __slots__ = ("__weakref__", "_home", "_making", "directory", "fd", "object_id", "path", "size_bytes")

    def __init__(
        self, fd: int, object_id: ObjectId, size_bytes: int, directory: int, path: str, home: HotDirectory | None = None
    ) -> None:
        self.fd = fd
        self.object_id = object_id
        self.size_bytes = size_bytes
        self.directory = directory
        self.path = path
        self._home = home
        self._making = threading.Lock()

    def ensure(self) -> None:
        """Make the file unless that was done. Blocks; any thread may call it. Raises HotFull, HotSick."""
        if self.fd < 0:
            with self._making:
                if self.fd < 0:
                    assert self._home is not None
                    self.fd = _make(self._home, _name(self.object_id), self.size_bytes, self.path)

    def birth(self) -> tuple[int, str, int]:
        """How to make the file: descriptor of the directory, name below it, size. See `_make` for the rest."""
        assert self._home is not None
        return self._home.fd, _name(self.object_id), self.size_bytes

    def adopt(self, fd: int) -> None:
        """Take over the descriptor of the file, which has been made."""
        assert self.fd < 0, "two have made one file"
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                close(self.fd)


class HotTier:
    """The hot directories of this node. Every method blocks: call it in a thread.

    `directory` is the position of a hot directory, as in HotRecord.
    """

    def __init__(self, directories: Sequence[HotDirectory]) -> None:
        assert [each.position for each in directories] == list(range(len(directories)))
        self.directories = tuple(directories)

    def begin(self, object_id: ObjectId, size_bytes: int, directory: int) -> HotFile:
        """A file that is made by its `ensure`; does not touch the disk."""
        home = self.directories[directory]
        path = f"{home.path}/objects/{_name(object_id)}"
        return HotFile(-1, object_id, size_bytes, directory, path, home)

    def create(self, object_id: ObjectId, size_bytes: int, directory: int) -> HotFile:
        """A new sparse file of exactly `size_bytes`; a leftover of that name is replaced. Raises HotFull, HotSick."""
        file = self.begin(object_id, size_bytes, directory)
        file.ensure()
        return file

    def open(self, object_id: ObjectId, size_bytes: int, directory: int) -> HotFile:
        """The file of an object. Raises NotHeld when it is missing or not of this size, HotFull, HotSick."""
        home, name = self.directories[directory], _name(object_id)
        path = f"{home.path}/objects/{name}"
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=home.fd)
            file = HotFile(fd, object_id, size_bytes, directory, path)
            found = os.fstat(fd)
        except OSError as error:
            if error.errno in _MISSING:
                raise NotHeld(f"{path} is missing") from error
            raise refusal(error, "open", path) from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
            raise NotHeld(f"{path} has {found.st_size} bytes instead of {size_bytes}")
        return file

    def hash_on_disk(self, object_id: ObjectId, size_bytes: int, directory: int, offset: int, length: int) -> int:
        """xxh3-64 of these bytes as the disk gives them, past the page cache where that can be. Raises NotHeld, HotTierError."""
        file = self.open(object_id, size_bytes, directory)
        try:
            fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return hash_range(file, offset, length)  # a file system without direct reads
        direct = HotFile(fd, object_id, size_bytes, directory, file.path)
        with mmap.mmap(-1, PIECE_BYTES) as memory:  # pages: aligned as direct reads want it
            return _hash(direct, offset, length, memoryview(memory))

    def unlink(self, object_id: ObjectId, directory: int) -> None:
        """Remove the file (a missing one is fine); its blocks are free when the last descriptor goes. Raises HotSick."""
        home, name = self.directories[directory], _name(object_id)
        try:
            os.unlink(name, dir_fd=home.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise refusal(error, "unlink", f"{home.path}/objects/{name}") from error

    def walk(self, directory: int) -> Iterator[tuple[ObjectId, int, int]]:
        """(id, size, bytes occupied on disk) of every file of a hot directory, in no order and in bounded memory.

        Names that are not an object's are passed over. Raises HotFull, HotSick.
        """
        home = self.directories[directory]
        try:
            for fan_out in _scan(home.fd, "."):
                if len(fan_out.name) != 2 or not fan_out.is_dir(follow_symlinks=False):
                    continue
                for found in _scan(home.fd, fan_out.name):
                    object_id = _object_id(fan_out.name, found.name)
                    if object_id is None:
                        continue
                    with contextlib.suppress(FileNotFoundError):  # evicted while we walk
                        about = found.stat(follow_symlinks=False)
                        yield object_id, about.st_size, about.st_blocks * 512
        except OSError as error:
            raise refusal(error, "walk", f"{home.path}/objects") from error

    def syncfs(self, directory: int) -> None:
        """Write everything back. Raises HotSick when that, or any write-back since the last call, failed."""
        home = self.directories[directory]
        if _libc.syncfs(home.fd) != 0:
            error = OSError(ctypes.get_errno(), "syncfs")
            raise HotSick(
                f"bytes written to {home.path} did not reach its disk: {os.strerror(error.errno or 0)}",
                hint="check the disk (kernel log); what was filled since the last good sync is dropped",
            ) from error

    def filesystem(self, directory: int) -> Filesystem:
        """Free and total bytes of the file system below. Raises HotSick."""
        home = self.directories[directory]
        try:
            found = os.fstatvfs(home.fd)
        except OSError as error:
            raise refusal(error, "ask for the free space of", str(home.path)) from error
        return Filesystem(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _name(object_id: ObjectId) -> str:
    name = object_id.hex()
    assert len(name) == 2 * OBJECT_ID_BYTES
    return f"{name[:2]}/{name}"


def _object_id(fan_out: str, name: str) -> ObjectId | None:
    """The id that a file name stands for; None for a name that is not ours."""
    if len(name) != 2 * OBJECT_ID_BYTES or not name.startswith(fan_out) or name != name.lower():
        return None
    try:
        return ObjectId(bytes.fromhex(name))
    except ValueError:
        return None


def _make(home: HotDirectory, name: str, size_bytes: int, path: str) -> int:
    try:
        fd = _create(home.fd, name)
        try:
            os.ftruncate(fd, size_bytes)
        except OSError:
            os.close(fd)
            os.unlink(name, dir_fd=home.fd)
            raise
    except OSError as error:
        raise refusal(error, "create", path) from error
    return fd


def _create(objects_fd: int, name: str) -> int:
    for attempt in range(1, _CREATE_ATTEMPTS + 1):
        try:
            return os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600, dir_fd=objects_fd)
        except FileNotFoundError:
            if attempt == _CREATE_ATTEMPTS:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name[:2], 0o700, dir_fd=objects_fd)
        except FileExistsError:
            if attempt == _CREATE_ATTEMPTS:
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=objects_fd)
    raise AssertionError("the last attempt returns or raises")


def _scan(objects_fd: int, name: str) -> Iterator[os.DirEntry[str]]:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=objects_fd)
    try:
        with os.scandir(fd) as entries:
            yield from entries
    finally:
        os.close(fd)


def read(file: HotFile, offset: int, length: int) -> bytes:
    """Exactly these bytes of the file; blocks. Raises HotSick, also when the file ends before them."""
    pieces: list[bytes] = []
    missing = length
    while missing > 0:
        try:
            piece = os.pread(file.fd, missing, offset + length - missing)
        except OSError as error:
            raise refusal(error, "read", file.path) from error
        if not piece:
            raise _shortened(file, offset + length - missing)
        pieces.append(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_into(file: HotFile, offset: int, memory: memoryview) -> memoryview:
    """As many bytes of the file as the memory takes, which is returned; blocks. Raises as `read` does."""
    done = 0
    while done < len(memory):
        try:
            got_bytes = os.preadv(file.fd, (memory[done:],), offset + done)
        except OSError as error:
            raise refusal(error, "read", file.path) from error
        if not got_bytes:
            raise _shortened(file, offset + done)
        done += got_bytes
    return memory


def read_resident(file: HotFile, offset: int, length: int) -> bytes | None:
    """These bytes when all of them are in the page cache, else None; never waits for the disk. Raises HotSick.

    For the event loop. None is no error: read them in a thread then (the kernel has begun to fetch them).
    """
    memory = bytearray(length)
    try:
        got_bytes = os.preadv(file.fd, (memory,), offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return None
        raise refusal(error, "read", file.path) from error
    return bytes(memory) if got_bytes == length else None


class Placed:
    """Bytes that lie in a hot file and are in the page cache, in place of the bytes. `len` as of the bytes."""

    __slots__ = ("file", "length", "offset")

    def __init__(self, file: HotFile, offset: int, length: int) -> None:
        self.file = file
        self.offset = offset
        self.length = length

    def __len__(self) -> int:
        return self.length


def place(file: HotFile, offset: int, length: int) -> Placed | None:
    """Like `read_resident`, without reading them: their first and last byte are looked at. Raises HotSick."""
    for at in (offset, offset + length - 1):
        if read_resident(file, at, 1) is None:
            return None
    return Placed(file, offset, length)


def hash_range(file: HotFile, offset: int, length: int) -> int:
    """xxh3-64 of these bytes of the file; blocks, without the GIL. Raises HotSick, also when the file ends before them."""
    return _hash(file, offset, length, memoryview(bytearray(min(PIECE_BYTES, max(length, 1)))))


def _hash(file: HotFile, offset: int, length: int, memory: memoryview) -> int:
    """Reads whole pieces of `memory`, also beyond what is hashed: direct reads know blocks only."""
    hasher = xxhash.xxh3_64()
    done = 0
    with memory:
        while done < length:
            try:
                got_bytes = os.preadv(file.fd, (memory,), offset + done)
            except OSError as error:
                raise refusal(error, "read", file.path) from error
            if got_bytes == 0:
                raise _shortened(file, offset + done)
            with memory[: min(got_bytes, length - done)] as piece:
                hasher.update(piece)
            done += got_bytes
    return hasher.intdigest()


def _shortened(file: HotFile, offset: int) -> HotSick:
    return HotSick(f"{file.path} ends at byte {offset} of {file.size_bytes}", hint="something else truncated this cache file")
