"""The native side of the session: loads the extension, decides which path reads take, and publishes hot files to it.

Three paths, best first; each says why it is not the one before it:

* *passthrough*: the kernel reads the hot file itself (Linux 6.9, CAP_SYS_ADMIN, a cache directory that is not on a stacked
  file system);
* *plain, native*: threads of the extension answer opens and reads of hot files without Python (libfuse 3.14);
* *plain, Python*: every request goes through the event loop.

`import tiercache.fuse.native` must come before any import of pyfuse3: the extension stands between the two (`mounting.c`).
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, NamedTuple

from tiercache.core.record import Entry, Inode, ObjectId
from tiercache.engine.publication import StillOpen, Use
from tiercache.errors import SetupError
from tiercache.fuse.mountpoint import has_sys_admin
from tiercache.index.records import Codec
from tiercache.tiers.hot import Placed

Wanted = Literal["auto", "plain", "python"]

PUBLISHED_MOST = 262_144  # some 400 bytes each
HARVEST_COUNT = 4096
LEAST_THREADS, MOST_THREADS = 4, 8  # one is always left that does not wait for a disk

_ENTRIES = Codec(Entry)  # texts with any bytes in them, as keys are


def _load() -> tuple[ModuleType | None, str]:
    assert "pyfuse3" not in sys.modules or "tiercache.fuse._kernel" in sys.modules, "pyfuse3 was imported first"
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        from tiercache.fuse import _kernel
    except ImportError as error:
        return None, str(error)
    finally:
        sys.setdlopenflags(before)
    return _kernel, ""


_kernel, _missing = _load()

NATIVE_HANDLE = 1 << 63


class Connection(NamedTuple):
    """What a successor needs to take a mount over: the connection to the kernel, and the table of what is open."""

    fuse_fd: int
    table_fd: int


OpenRequest = tuple[int, int, int]
"""Number of the request, inode, flags."""


ReadRequest = tuple[int, int, int, int]
"""Number of the request, inode, offset, size."""


class Path(NamedTuple):
    """How hot files are read: "passthrough" or "plain", and why not better. `is_native`: without Python."""

    kind: Literal["passthrough", "plain"]
    reason: str
    is_native: bool


class Native:
    """The extension, for one mount. Implements `engine.publication.Publication`.

    `directories` are descriptors of the hot directories, by their position.
    """

    def __init__(self, kernel: ModuleType, datasets: Sequence[str], directories: Sequence[int], wanted: Wanted) -> None:
        self._kernel = kernel
        self._datasets = list(datasets)
        self._positions = {name: position for position, name in enumerate(datasets)}
        self._directories = directories
        self._wanted = wanted
        self._trouble = ""
        self._is_mounted = False

    def prepare(self, predecessor: Connection | None) -> None:
        """Before pyfuse3 mounts. Raises SetupError when what a predecessor left cannot be taken over."""
        kernel = self._kernel
        flags = kernel.HAS_RESEND | (kernel.PASSTHROUGH if self._wanted == "auto" and has_sys_admin() else 0)
        threads = min(MOST_THREADS, max(LEAST_THREADS, os.cpu_count() or 1))
        try:
            kernel.prepare(tuple(self._directories), threads, flags, PUBLISHED_MOST, *(predecessor or (-1, -1)))
        except OSError as error:
            if predecessor is None:
                self._trouble = f"through Python: {error.strerror}"
                return
            reason = error.strerror or "unknown error"
            if error.errno == errno.EPROTO:
                reason = "the daemon that left it was of a version that kept other records"
            raise SetupError(f"the mount cannot be taken over: {reason}", hint="unmount it and mount anew") from error

    @property
    def is_mounted(self) -> bool:
        return self._is_mounted

    @property
    def connection(self) -> Connection | None:
        """None where nothing can be handed over. To be asked for when the kernel has been answered its first request."""
        if not self._is_mounted:
            return None
        _, agreed = self._kernel.flags()
        if not agreed & self._kernel.HAS_RESEND:  # whoever waits for an answer when we die would wait for ever
            return None
        return Connection(*self._kernel.connection())

    def mounted(self) -> None:
        """pyfuse3 has mounted: does the extension serve?"""
        self._is_mounted = self._kernel.mounted()

    def choose_path(self) -> Path:
        """Blocks a little. To be called when the kernel has been answered its first request."""
        if not self._is_mounted:
            return Path("plain", self._trouble or "through Python: libfuse is older than 3.14", False)
        reason = self._why_no_passthrough()
        self._kernel.set_passthrough(not reason)
        return Path("plain", reason, True) if reason else Path("passthrough", "", True)

    def _why_no_passthrough(self) -> str:
        if self._wanted == "plain":
            return "as configured"
        if not has_sys_admin():
            return "passthrough needs the capability CAP_SYS_ADMIN"
        _, agreed = self._kernel.flags()
        if not agreed & self._kernel.PASSTHROUGH:
            return "the kernel does not offer passthrough (Linux 6.9 and later do)"
        for position, directory in enumerate(self._directories):
            try:
                fd, name = tempfile.mkstemp(prefix="probe-", dir=f"/proc/self/fd/{directory}")
            except OSError as error:
                return f"hot directory {position} cannot be written to: {error.strerror}"
            try:
                number = self._kernel.probe(fd)
            finally:
                os.close(fd)
                os.unlink(name)
            if number == errno.EPERM:
                return "passthrough needs the capability CAP_SYS_ADMIN"
            if number == errno.ELOOP:
                return f"hot directory {position} is on a stacked file system (overlayfs)"
            if number:
                return f"the kernel refuses passthrough for hot directory {position}: {os.strerror(number)}"
        return ""

    def stop(self) -> None:
        """End the threads; what is not answered stays with the kernel. Blocks."""
        self._kernel.stop()

    def close(self) -> None:
        self._kernel.close()

    def counts(self) -> dict[str, int]:
        counted: dict[str, int] = self._kernel.counts()
        return counted

    # -- opens and reads that need Python

    def opens_fd(self) -> int:
        """Readable while `take_opens` has something. From the first call on pyfuse3 sees no OPEN any more."""
        return int(self._kernel.opens_fd())

    def take_opens(self, limit: int) -> list[OpenRequest]:
        taken: list[OpenRequest] = self._kernel.take_opens(limit)
        return taken

    def answer_open(self, unique: int, number: int, handle: int) -> None:
        self._kernel.answer_open(unique, number, handle)

    def reads_fd(self) -> int:
        return int(self._kernel.reads_fd())

    def take_reads(self, limit: int) -> list[ReadRequest]:
        taken: list[ReadRequest] = self._kernel.take_reads(limit)
        return taken

    def answer_read(self, unique: int, number: int, data: bytes) -> None:
        self._kernel.answer_read(unique, number, data)

    def answer_read_from(self, unique: int, inode: Inode, placed: Placed) -> None:
        """A thread reads them, from a descriptor of its own: `placed` is not needed any more."""
        self._kernel.answer_read_from(unique, inode, placed.file.fd, placed.offset, placed.length)

    # -- publication

    def publish(self, entry: Entry, directory: int) -> bool:
        blob = _ENTRIES.encode(entry)
        dataset = self._positions[entry.dataset]
        return bool(self._kernel.publish(entry.inode, entry.object_id, directory, dataset, entry.size_bytes, blob))

    def withdraw(self, entry: Entry) -> None:
        self._kernel.forget_name(entry.parent, entry.name)
        self._kernel.withdraw(entry.inode)

    def forget_name(self, parent: Inode, name: bytes) -> None:
        self._kernel.forget_name(parent, name)

    def withdraw_object(self, object_id: ObjectId) -> int:
        return int(self._kernel.withdraw_object(object_id))

    def uses(self, object_id: ObjectId) -> int:
        return int(self._kernel.uses(object_id))

    def hand_over(self, entry: Entry) -> bool:
        return bool(self._kernel.hand_over(entry.inode, _ENTRIES.encode(entry)))

    def harvest(self) -> list[Use]:
        return [
            Use(ObjectId(object_id), self._datasets[dataset], opens, read_bytes, size_bytes, seconds)
            for _, object_id, dataset, opens, read_bytes, size_bytes, seconds in self._kernel.harvest(HARVEST_COUNT)
        ]

    def still_open(self) -> list[StillOpen]:
        found = []
        for inode, _, _, daemon, blob in self._kernel.opened():
            entry = _ENTRIES.decode(blob) if blob else None
            if entry is not None and entry.inode == inode and entry.dataset in self._positions:
                found.append(StillOpen(entry, daemon))
        return found


def native(datasets: Sequence[str], directories: Sequence[int], wanted: Wanted) -> tuple[Native | None, str]:
    """The native side, or None and why there is none."""
    if _kernel is None:
        return None, f"through Python: the extension is not there ({_missing})"
    if wanted == "python":
        return None, "through Python: as configured"
    return Native(_kernel, datasets, directories, wanted), ""
