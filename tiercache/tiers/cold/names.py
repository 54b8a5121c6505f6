"""The sorted names of directories that are being listed, kept between two pages.

A listing comes in pages of a thousand names in byte order, a directory gives its names in no order
and from the start. Sorting all names anew for every page would make a directory of 100,000 files a hundred
times as slow, and looking up one name in it as slow as listing it. So the names of the last few
directories are kept. A first page trusts them only while the directory's times are unchanged and were older than a tick
of the clock when the names were taken; a later page takes what its first page has seen.

Bounds: 16 directories, and 300,000 names (25 MB) unless one directory alone has more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict

from tiercache.tiers.beneath import TICK_SECONDS

MAX_DIRECTORIES = 16
MAX_NAMES = 300_000

Stamp = tuple[int, int, int, int]


class Names:
    """Names by directory (its key: '' or ending in '/'). Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Stamp | None, list[bytes]]] = OrderedDict()
        self._count = 0

    def of(self, key: bytes, directory: int, *, continuing: bool) -> list[bytes]:
        """Sorted names in the open directory; those of directories end in '/'. Not to be changed. Raises OSError."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is not None and (continuing or kept[0] == _stamp(directory)):
            return kept[1]
        stamp = _stamp(directory)
        began = time.time()
        names = sorted(_scan(directory))
        settled = began - max(stamp[2:]) / 1e9 > TICK_SECONDS
        self._keep(key, stamp if settled and stamp == _stamp(directory) else None, names)
        return names

    def _keep(self, key: bytes, stamp: Stamp | None, names: list[bytes]) -> None:
        with self._lock:
            _, before = self._kept.pop(key, (None, []))
            self._kept[key] = (stamp, names)
            self._count += len(names) - len(before)
            while len(self._kept) > MAX_DIRECTORIES or (self._count > MAX_NAMES and len(self._kept) > 1):
                _, (_, dropped) = self._kept.popitem(last=False)
                self._count -= len(dropped)


def _stamp(directory: int) -> Stamp:
    found = os.fstat(directory)
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def _scan(directory: int) -> list[bytes]:
    with os.scandir(directory) as entries:
        return [os.fsencode(entry.name) + (b"/" if entry.is_dir(follow_symlinks=False) else b"") for entry in entries]
