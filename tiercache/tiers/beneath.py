"""Opening files below a directory without ever leaving it, whatever the key says and whatever the tree holds.

Keys come from a listing, i.e. from strangers, and a tree may hold links to anywhere. So a path is
walked one component at a time, relative to the descriptor of its parent and with O_NOFOLLOW: there is no
moment between check and use in which a component could be exchanged for a link. One kind of link is
followed: a *final* component that leads to a place inside the same tree, resolved here and
walked by the same rules. Links to directories are not followed (loops, and one file under many keys).

openat2(RESOLVE_BENEATH) does most of this in the kernel, but needs a raw system call from Python, is refused in some
containers, and rejects absolute links into the same tree. The walk costs about 4 us a component.

Every function here blocks; OSError is the only error: ELOOP for a link that leads out or round in circles.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_LINKS = 8

# What opening may answer when the path does not lead to a regular file of this tree.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENXIO})

# A file that changes twice within one tick of the kernel's clock keeps its times (before Linux 6.13; 10 ms at HZ=100), so
# that equal times prove nothing as long as the tick lasts.
TICK_SECONDS = 0.02


def components(key: str) -> tuple[bytes, ...] | None:
    """The key as path components, or None when no file below a directory can be meant: 'a//b', '../x', '/x', 'x/', NUL."""
    parts = tuple(key.encode("utf-8", "surrogateescape").split(b"/"))
    odd = any(part in (b"", b".", b"..") or b"\0" in part for part in parts)
    return None if odd else parts


def open_directory(root: int, parts: Sequence[bytes], flags: int = os.O_RDONLY) -> int:
    """Open the directory at `parts` below the directory `root`; no component may be a link."""
    at = os.open(b".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC if parts else flags | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    for position, part in enumerate(parts):
        how = flags if position == len(parts) - 1 else os.O_PATH
        try:
            below = os.open(part, how | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def open_file(root: int, parts: Sequence[bytes]) -> int:
    """Open a file for reading. Anything that is not a regular file ends in OSError or is for the caller to see by fstat."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return _resolved(root, parts, lambda name, parent: os.open(name, flags, dir_fd=parent))


def stat_file(root: int, parts: Sequence[bytes]) -> os.stat_result:
    """What `open_file` would open, without opening it."""

    def look(name: bytes, parent: int) -> os.stat_result:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return found

    return _resolved(root, parts, look)


def wait_out_tick(found: os.stat_result) -> None:
    """Wait (20 ms at most) until a change of the file would show in its times."""
    age_seconds = time.time() - max(found.st_mtime_ns, found.st_ctime_ns) / 1e9
    if 0.0 <= age_seconds < TICK_SECONDS:
        time.sleep(TICK_SECONDS - age_seconds)


def _resolved(root: int, parts: Sequence[bytes], act: Callable[[bytes, int], T]) -> T:
    """`act` on the last component; where it reports a link (ELOOP), on what the link leads to."""
    for _ in range(MAX_LINKS):
        parent = open_directory(root, parts[:-1], os.O_PATH)
        try:
            return act(parts[-1], parent)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            parts = _target(root, parts[:-1], os.readlink(parts[-1], dir_fd=parent))
        finally:
            os.close(parent)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _target(root: int, parent: Sequence[bytes], link: bytes) -> list[bytes]:
    """Where a link in the directory `parent` leads, as components below the root.

    '..' may be taken off by counting, because no component of `parent` is a link.
    """
    found = list(parent)
    if link.startswith(b"/"):
        top = os.readlink(b"/proc/self/fd/%d" % root)
        if not link.startswith(top.rstrip(b"/") + b"/"):
            raise OSError(errno.ELOOP, "the link leads out of the tree")
        found, link = [], link[len(top) :]
    for part in link.split(b"/"):
        if part == b"..":
            if not found:
                raise OSError(errno.ELOOP, "the link leads out of the tree")
            found.pop()
        elif part not in (b"", b"."):
            found.append(part)
    if not found:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    return found
