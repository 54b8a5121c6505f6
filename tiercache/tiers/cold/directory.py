"""A directory as the cold store (`file://`): an archive on NFS, a tape gateway, or just a local tree.

A key is a file's path relative to the directory, a prefix is a directory (whether or not anything is in it) or the
beginning of a name. Which names are keys: regular files, and links that lead to a regular file inside
the tree (`tiers/beneath.py`). Links to directories, links that lead out, sockets, pipes and devices are not listed and not
found. Names that are not UTF-8 survive by surrogateescape.

**Versions.** The version tag is size, mtime and ctime in nanoseconds: ctime cannot be set, so that a
same-size overwrite with its mtime put back is still noticed. Every piece is checked *after* it was read and
before the sink accepts it: the kernel sets the times before it changes a byte, so equal times mean that
the piece is of this version. Two limits: a change through mmap shows only when the page is first made dirty, and within one tick
of the kernel's clock a second change leaves no trace (that tick is waited out before reading).

**A source that vanishes.** An unmounted archive leaves an empty directory behind, which must not pass
for an empty dataset. The identity (device, inode) of the root is learned at the first access, normally
`probe`, and compared at each one after; another root is Unavailable. Filesystems without a device of their
own (NFS, FUSE) may get another device number when they are mounted again (autofs does so all the time), so there the
inode decides. No descriptor is kept, because it would keep the archive from being unmounted.

**Threads.** All work runs in threads of the given limiter. A cancelled read tells its thread to stop, which it
does at the next piece, and waits a second for that; a thread that hangs in the kernel is given up and keeps
its place in the limiter until it returns, so that a dead archive cannot use up the process.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import trio

from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import AccessDenied, BadResponse, NotFound, SetupError, TierError, Unavailable, VersionChanged
from tiercache.tiers.beneath import ABSENT, components, open_directory, open_file, stat_file, wait_out_tick
from tiercache.tiers.cold.walk import Walk
from tiercache.tiers.tier import MAX_PAGE, Sink

T = TypeVar("T")

PIECE_BYTES = 1 << 20
GRACE_SECONDS = 1.0

_EMPTY = Page((), (), "")


def version_tag(found: os.stat_result) -> str:
    """The version tag of a file: 'size-mtime_ns-ctime_ns'."""
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"


class Directory:
    """A `Cold` tier over the directory `path`. `source_id` defaults to its URL. `threads` bounds its blocking work."""

    def __init__(self, path: str | Path, *, dataset: str, source_id: str | None = None, threads: trio.CapacityLimiter) -> None:
        self.name = "cold"
        self.path = os.path.abspath(path)
        self.source_id = source_id if source_id is not None else f"file://{self.path}"
        self._dataset = dataset
        self._threads = threads
        self._walk = Walk()
        self._identity: tuple[int, int] | None = None
        self._closed = False

    async def probe(self) -> bool:
        """First contact: is there anything? SetupError, in one line, when the directory cannot be listed."""

        def look() -> bool:
            try:
                with closing(os.scandir(self.path)) as entries:
                    holds = next(entries, None) is not None
            except FileNotFoundError:
                raise SetupError(f"source {self.path} does not exist", hint="create it, mount it or correct the path") from None
            except NotADirectoryError:
                raise SetupError(
                    f"source {self.path} is not a directory", hint="name the directory that holds the files"
                ) from None
            except PermissionError:
                raise SetupError(f"source {self.path} cannot be read", hint="give this user read and search permission") from None
            except OSError as error:
                raise SetupError(f"source {self.path}: {error.strerror}", hint="check the filesystem it lies on") from error
            with self._root():
                return holds

        return await self._in_thread(look)

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        assert offset >= 0
        assert length > 0
        assert offset + length <= ref.size_bytes
        reading = _Reading(lambda stopped: self._copy(ref, offset, length, sink, stopped))
        try:
            await self._in_thread(reading.run)
        except trio.Cancelled:
            if reading.stop():
                with trio.move_on_after(GRACE_SECONDS, shield=True):
                    await reading.ended.wait()
            raise

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        return await self._in_thread(lambda: self._page(prefix, delimiter, token, min(limit, MAX_PAGE)))

    async def head(self, key: str) -> Listed:
        parts = self._parts(key)

        def look() -> Listed:
            with self._root() as root, self._named(key):
                found = stat_file(root, parts)
            if not stat.S_ISREG(found.st_mode):
                raise NotFound(f"{self.path}: {key!r} is not a regular file")
            return _listed(key, found)

        return await self._in_thread(look)

    async def aclose(self) -> None:
        self._closed = True

    async def _in_thread(self, job: Callable[[], T]) -> T:
        self._check_open()
        return await trio.to_thread.run_sync(job, abandon_on_cancel=True, limiter=self._threads)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.path}: closed")

    def _parts(self, key: str) -> tuple[bytes, ...]:
        parts = components(key)
        if parts is None:
            raise NotFound(f"{self.path}: no file can be called {key!r}")
        return parts

    @contextmanager
    def _root(self) -> Iterator[int]:
        """The root, opened and compared with the one first seen. Unavailable when it is gone or another one."""
        try:
            root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"source {self.path}: {error.strerror}", hint="mount it again or make it readable") from error
        try:
            found = os.fstat(root)
            seen = (found.st_dev, found.st_ino)
            if self._identity is None:
                self._identity = seen
            if not _same_root(self._identity, seen):
                raise Unavailable(
                    f"source {self.path} is not the directory that it was",
                    hint="mount it again; if it was replaced on purpose, restart tiercache",
                )
            yield root
        finally:
            os.close(root)

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Operating system errors as errors of the tier."""
        try:
            yield
        except OSError as error:
            raise self._tier_error(error, key) from error

    def _tier_error(self, error: OSError, key: str) -> TierError:
        if error.errno in ABSENT:
            return NotFound(f"{self.path}: no file {key!r}")
        if error.errno in (errno.EACCES, errno.EPERM):
            return AccessDenied(f"{self.path}: no permission to read {key!r}", hint="give this user read permission")
        return Unavailable(f"{self.path}: {key!r}: {error.strerror}")

    def _copy(self, ref: ObjectRef, offset: int, length: int, sink: Sink, stopped: Callable[[], bool]) -> None:
        parts = self._parts(ref.key)
        with self._root() as root, self._named(ref.key):
            file = open_file(root, parts)
        try:
            self._copy_open(file, ref, offset, length, sink, stopped)
        finally:
            os.close(file)

    def _copy_open(self, file: int, ref: ObjectRef, offset: int, length: int, sink: Sink, stopped: Callable[[], bool]) -> None:
        with self._named(ref.key):
            found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{self.path}: {ref.key!r} is not a regular file")
        wait_out_tick(found)
        self._check_version(file, ref)
        end = offset + length
        while offset < end and not stopped():
            self._check_open()
            room = sink.buffer(min(end - offset, PIECE_BYTES))
            with self._named(ref.key):
                count = os.preadv(file, [room], offset)
            self._check_version(file, ref)
            if count == 0:
                raise BadResponse(f"{self.path}: {ref.key!r} ended at {offset} of {ref.size_bytes} bytes")
            sink.advance(count)
            offset += count

    def _check_version(self, file: int, ref: ObjectRef) -> None:
        with self._named(ref.key):
            seen = version_tag(os.fstat(file))
        if seen != ref.version:
            raise VersionChanged(f"{self.path}: {ref.key!r} is version {seen}, no longer {ref.version}")

    def _page(self, prefix: str, delimiter: bool, token: str, limit: int) -> Page:
        raw = prefix.encode("utf-8", "surrogateescape")
        above, slash, stem = raw.rpartition(b"/")
        parts = components(above.decode("utf-8", "surrogateescape")) if slash else ()
        if parts is None:
            return _EMPTY
        after = token.encode("utf-8", "surrogateescape")[len(above) + len(slash) :]
        objects: list[Listed] = []
        prefixes: list[str] = []
        last = ""
        with self._root() as root:
            try:
                top = open_directory(root, parts)
            except OSError as error:
                if error.errno in ABSENT:
                    return _EMPTY
                raise self._tier_error(error, prefix) from error
            with (
                self._named(prefix),
                closing(self._walk.below(root, top, above + slash, stem, after, deep=not delimiter)) as found,
            ):
                for key, status in found:
                    if len(objects) + len(prefixes) == limit:
                        return Page(tuple(objects), tuple(prefixes), last)
                    last = key.decode("utf-8", "surrogateescape")
                    if status is None:
                        prefixes.append(last)
                    else:
                        objects.append(_listed(last, status))
        return Page(tuple(objects), tuple(prefixes), "")


class _Reading:
    """One read in a thread that may be told to stop, and says when it has ended."""

    def __init__(self, copy: Callable[[Callable[[], bool]], None]) -> None:
        self.ended = trio.Event()
        self._copy = copy
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._started = False
        self._stopped = False

    def run(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._started = True
        try:
            self._copy(lambda: self._stopped)
        finally:
            self._announce()

    def stop(self) -> bool:
        """Ask the thread to stop; False when it has not begun, and then never will."""
        with self._lock:
            self._stopped = True
            return self._started

    def _announce(self) -> None:
        try:
            self._token.run_sync_soon(self.ended.set)
        except trio.RunFinishedError:
            return  # the thread outlived the event loop: nobody waits


def _listed(key: str, found: os.stat_result) -> Listed:
    return Listed(key, version_tag(found), found.st_size, found.st_mtime_ns // 1_000_000_000)


def _same_root(first: tuple[int, int], now: tuple[int, int]) -> bool:
    if first == now:
        return True
    both_without_device = os.major(first[0]) == 0 == os.major(now[0])
    return both_without_device and first[1] == now[1]
