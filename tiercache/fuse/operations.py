"""The FUSE operations: translation between the kernel's requests and the engine, and nothing else.

Read-only. Inode numbers are the namespace's own and outlive the process, so `forget` needs no book-keeping and a file
handle is its inode. An inode is one version of a file: its attributes never change, hence the long `attr_timeout`;
freshness is the entry's, hence `entry_timeout` from the namespace. `keep_cache` is right for the same reason:
the page cache of an inode never goes stale, a new version has a new one.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import structlog

from tiercache.core.record import Entry, Inode, Kind
from tiercache.engine.namespace import DirectoryStream, Namespace
from tiercache.engine.reader import Reader
from tiercache.errors import NotFound, TiercacheError, VersionChanged
from tiercache.fuse.errnos import errno_of
from tiercache.fuse.native import NATIVE_HANDLE  # before pyfuse3: see there
from tiercache.tiers.hot import Placed

import pyfuse3  # isort: skip
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, StatvfsData  # isort: skip

log = structlog.get_logger()
P = ParamSpec("P")
R = TypeVar("R")
Asynchronous = Callable[P, Coroutine[Any, Any, R]]

ATTRIBUTES_SECONDS = 86400.0
BLOCK_BYTES = 4096
NAME_MAX = 255
LISTED_POSITION = 1 << 62  # see _kernel.c: of a handle that a predecessor gave
XATTR_PREFIX = b"user.tiercache."


class Meter(Protocol):
    """Where operations report: the daemon connects it to the metrics."""

    def operation(self, name: str, seconds: float) -> None: ...

    def error(self, name: str, number: int) -> None: ...


class Facts(Protocol):
    """What extended attributes tell about a file; each raises TiercacheError or returns text."""

    def residency(self, entry: Entry) -> str: ...

    def checksum(self, entry: Entry) -> str: ...


@dataclass(frozen=True)
class Owner:
    """What every file and directory of the mount shows as owner, group and permission bits."""

    uid: int
    gid: int
    file_mode: int
    dir_mode: int


class _OpenDirectory:
    """A directory handle, with the last batch of entries: the kernel asks for a few at a time."""

    def __init__(self, stream: DirectoryStream) -> None:
        self.stream = stream
        self.position = 0
        self.batch: list[tuple[Entry, int]] = []

    async def from_position(self, position: int) -> list[tuple[Entry, int]]:
        at = self.position
        for index, (_, following) in enumerate(self.batch):
            if at == position:
                return self.batch[index:]
            at = following
        self.position, self.batch = position, await self.stream.read(position)
        return self.batch


def _is_read_only(flags: int) -> bool:
    return flags & (os.O_ACCMODE | os.O_TRUNC | os.O_APPEND) == os.O_RDONLY


def operation(name: str) -> Callable[[Asynchronous[P, R]], Asynchronous[P, R]]:
    """Time a handler, and turn what the engine raises into an errno."""

    def around(handler: Asynchronous[P, R]) -> Asynchronous[P, R]:
        @wraps(handler)
        async def handled(*args: P.args, **kwargs: P.kwargs) -> R:
            self = args[0]
            assert isinstance(self, Operations)
            began = time.perf_counter()
            try:
                return await handler(*args, **kwargs)
            except TiercacheError as error:
                number = errno_of(error)
                self.failed(name, number, error)
                raise FUSEError(number) from error
            finally:
                self.meter.operation(name, time.perf_counter() - began)

        return handled

    return around


class Operations(pyfuse3.Operations):
    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, namespace: Namespace, reader: Reader, facts: Facts, owner: Owner, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self._namespace = namespace
        self._reader = reader
        self._facts = facts
        self._owner = owner
        self._directories: dict[int, _OpenDirectory] = {}
        self._next_directory = 2
        self._strange_directories: dict[tuple[int, bool], _OpenDirectory] = {}
        self._quiet_until: dict[tuple[str, int], float] = {}

    def failed(self, name: str, number: int, error: TiercacheError) -> None:
        self.meter.error(name, number)
        if number in (errno.ENOENT, errno.ESTALE):
            return
        now = time.monotonic()
        if now >= self._quiet_until.get((name, number), 0.0):
            self._quiet_until[name, number] = now + 10.0
            log.warning("operation_failed", operation=name, errno=errno.errorcode[number], error=error.line)

    # -- names and attributes

    @operation("lookup")
    async def lookup(self, parent_inode: int, name: bytes, _ctx: RequestContext) -> EntryAttributes:
        if len(name) > NAME_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        try:
            entry, ttl_seconds = await self._namespace.lookup(Inode(parent_inode), name)
        except NotFound as error:
            absent = EntryAttributes()
            absent.st_ino = pyfuse3.InodeT(0)
            absent.entry_timeout = getattr(error, "negative_ttl_seconds", 0.0)
            if absent.entry_timeout <= 0:
                raise
            return absent
        return self._attributes(entry, ttl_seconds)

    @operation("getattr")
    async def getattr(self, inode: int, _ctx: RequestContext) -> EntryAttributes:
        entry = self._namespace.entry(Inode(inode))
        if entry is None:
            raise VersionChanged(f"inode {inode} is not known any more")
        return self._attributes(entry, 0.0)

    def _attributes(self, entry: Entry, ttl_seconds: float) -> EntryAttributes:
        owner = self._owner
        attributes = EntryAttributes()
        attributes.st_ino = pyfuse3.InodeT(entry.inode)
        attributes.entry_timeout = ttl_seconds
        attributes.attr_timeout = ATTRIBUTES_SECONDS
        if entry.kind is Kind.DIRECTORY:
            attributes.st_mode = pyfuse3.ModeT(stat.S_IFDIR | owner.dir_mode)
        else:
            attributes.st_mode = pyfuse3.ModeT(stat.S_IFREG | owner.file_mode)
        attributes.st_nlink = 1
        attributes.st_uid, attributes.st_gid = owner.uid, owner.gid
        attributes.st_size = entry.size_bytes
        attributes.st_blksize = BLOCK_BYTES
        attributes.st_blocks = -(-entry.size_bytes // 512)
        time_ns = entry.mtime_seconds * 1_000_000_000
        attributes.st_atime_ns = attributes.st_ctime_ns = attributes.st_mtime_ns = time_ns
        return attributes

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Nothing to forget: inode numbers are names, not references."""

    # -- directories

    @operation("opendir")
    async def opendir(self, inode: int, _ctx: RequestContext) -> int:
        stream = await self._namespace.open_directory(Inode(inode))
        handle = self._next_directory | stream.is_listed
        self._next_directory += 2
        self._directories[handle] = _OpenDirectory(stream)
        return handle

    @operation("readdir")
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        directory = self._directories.get(fh)
        if directory is None:
            directory = await self._strange(fh, is_listed=bool(start_id & LISTED_POSITION))
        start_id &= ~LISTED_POSITION
        while batch := await directory.from_position(start_id):
            for entry, following in batch:
                attributes = self._attributes(entry, self._namespace.ttl_seconds(entry))
                if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), attributes, following):
                    return
                start_id = following

    async def _strange(self, fh: int, *, is_listed: bool) -> _OpenDirectory:
        """A directory that a predecessor opened: listed again the way it did, so that positions mean the same."""
        if not fh & NATIVE_HANDLE:
            raise VersionChanged("the directory was opened before a restart")
        directory = self._strange_directories.get((fh, is_listed))
        if directory is None:
            stream = await self._namespace.reopen_directory(Inode(fh & ~NATIVE_HANDLE), is_listed=is_listed)
            directory = self._strange_directories[fh, is_listed] = _OpenDirectory(stream)
        return directory

    async def releasedir(self, fh: int) -> None:
        self._directories.pop(fh, None)
        for is_listed in (False, True):
            self._strange_directories.pop((fh, is_listed), None)

    # -- files

    async def open(self, inode: int, flags: int, _ctx: RequestContext) -> FileInfo:
        return FileInfo(fh=pyfuse3.FileHandleT(await self.open_file(inode, flags)), keep_cache=True)

    @operation("open")
    async def open_file(self, inode: int, flags: int) -> int:
        """The handle."""
        if not _is_read_only(flags):
            raise FUSEError(errno.EROFS)
        is_handed_over = await self._reader.open(Inode(inode))
        return inode | NATIVE_HANDLE if is_handed_over else inode

    def open_small(self, inode: int, flags: int, answer: Callable[[int, int | None], None]) -> bool:
        """Open a small cold file without a task: `answer` gets an errno, or 0 and the handle, or 0 and None when `open_file` has
        to do it after all. False: `answer` will not be called. Never waits."""
        if not _is_read_only(flags):
            return False
        began = time.perf_counter()

        def ended(is_open: bool, error: TiercacheError | None) -> None:
            number = 0
            if error is not None:
                number = errno_of(error)
                self.failed("open", number, error)
            if is_open or error is not None:
                self.meter.operation("open", time.perf_counter() - began)
            answer(number, inode | NATIVE_HANDLE if is_open else None)

        return self._reader.open_small(Inode(inode), ended)

    @operation("read")
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._reader.read(Inode(fh & ~NATIVE_HANDLE), off, size)

    @operation("read")
    async def find(self, inode: int, offset: int, size: int) -> bytes | Placed:
        return await self._reader.find(Inode(inode), offset, size)

    async def flush(self, fh: int) -> None:
        """Nothing was written. ENOSYS makes the kernel never ask again, which saves a request for every close."""
        raise FUSEError(errno.ENOSYS)

    async def release(self, fh: int) -> None:
        self._reader.release(Inode(fh & ~NATIVE_HANDLE))

    # -- the rest

    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        """With `default_permissions` the kernel decides by the mode bits."""
        return True

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """A bucket has no size: all of it reads as used, nothing as free."""
        data = StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_BYTES
        data.f_blocks = (1 << 50) // BLOCK_BYTES
        data.f_bfree = data.f_bavail = 0
        data.f_files = 1 << 40
        data.f_ffree = data.f_favail = 0
        data.f_namemax = NAME_MAX
        return data

    @operation("getxattr")
    async def getxattr(self, inode: int, name: bytes, _ctx: RequestContext) -> bytes:
        entry = self._namespace.entry(Inode(inode)) if name.startswith(XATTR_PREFIX) else None
        if entry is None or entry.kind is not Kind.FILE:
            raise FUSEError(pyfuse3.ENOATTR)
        match name.removeprefix(XATTR_PREFIX):
            case b"residency":
                return self._facts.residency(entry).encode()
            case b"version":
                return entry.version.encode("utf-8", "surrogateescape")
            case b"checksum":
                checksum = self._facts.checksum(entry)
                if checksum:
                    return checksum.encode()
        raise FUSEError(pyfuse3.ENOATTR)

    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        entry = self._namespace.entry(Inode(inode))
        if entry is None or entry.kind is not Kind.FILE:
            return []
        names = [b"residency", b"version"] + ([b"checksum"] if self._facts.checksum(entry) else [])
        return [XATTR_PREFIX + name for name in names]
