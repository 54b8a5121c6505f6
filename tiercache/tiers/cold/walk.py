"""Walking a directory tree in the order of a store: by the bytes of whole keys, from any point on.

Within one directory that is the order of the names, with '/' put behind those of directories; the keys below a
directory then fall exactly where its own name sorts, so that a depth-first walk gives a flat listing.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator

from tiercache.tiers.beneath import ABSENT, open_directory, stat_file
from tiercache.tiers.cold.names import Names

Found = tuple[bytes, os.stat_result | None]


class Walk:
    """Walks of one tree; remembers the names of directories from page to page. All methods block and raise OSError."""

    def __init__(self) -> None:
        self._names = Names()

    def below(self, root: int, top: int, at: bytes, stem: bytes, after: bytes, *, deep: bool) -> Generator[Found, None, None]:
        """Keys and prefixes (without status) in byte order: those after `at + after` whose next component begins with `stem`.

        `top` is the open directory at `at`, and is closed here. `deep` goes into directories instead of naming them.
        """
        levels = [(top, at, self._names_after(top, at, stem, after, deep), after)]
        try:
            while levels:
                directory, at, names, after = levels[-1]
                name = next(names, None)
                if name is None:
                    levels.pop()
                    os.close(directory)
                elif not name.endswith(b"/"):
                    status = _status(root, directory, at, name)
                    if status is not None:
                        yield at + name, status
                elif not deep:
                    yield at + name, None
                else:
                    child = _child(directory, name)
                    if child is not None:
                        rest = after[len(name) :] if after.startswith(name) else b""
                        levels.append((child, at + name, self._names_after(child, at + name, b"", rest, deep), rest))
        finally:
            for directory, _, _, _ in levels:
                os.close(directory)

    def _names_after(self, directory: int, at: bytes, stem: bytes, after: bytes, deep: bool) -> Iterator[bytes]:
        names = self._names.of(at, directory, continuing=bool(after))
        start = bisect_left(names, stem)
        if after:
            first, slash, _ = after.partition(b"/")
            resumed = bisect_left(names, first + slash) if deep and slash else bisect_right(names, after)
            start = max(start, resumed)
        for position in range(start, len(names)):
            if not names[position].startswith(stem):
                return
            yield names[position]


def _status(root: int, directory: int, at: bytes, name: bytes) -> os.stat_result | None:
    """The status of the file that a name stands for; None when it is none, or none any more."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            found = stat_file(root, (at + name).split(b"/"))
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    return found if stat.S_ISREG(found.st_mode) else None


def _child(directory: int, name: bytes) -> int | None:
    """Open a directory below; None when it has gone."""
    try:
        return open_directory(directory, (name[:-1],))
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
