"""The exclusive right to use a directory as a cache. Nobody's data is ever taken for a cache.

A directory is ours when it holds our marker, `tiercache.json` (format version and a uuid), or when it is new or
empty: then the marker is written. Anything else is refused, and so is a place where a cache makes no sense or does harm
(`place.py`). Every refusal is a SetupError of one line that names the culprit and the way out. It comes before
anything is created, unless the disk itself is what refuses.

One daemon for each directory: `flock` on `<dir>/lock` for life, released by the kernel however we die. The file
tells who holds it (pid, mount point, state). It is never removed: a lock on an unlinked file excludes nobody. A
holder that runs is reported within a second. One that is on its way out (it said so, its process is gone or is being
killed) is waited for: a successor takes over. The lock is taken before the marker is looked for again and written,
so that of two first claims only one wins.

The marker is written to a temporary name, synced, and renamed. That name and `lock` are what a crash in between may
leave behind; they count as empty.

Not handled: a child process that was forked without exec inherits the lock (every descriptor here is close-on-exec).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tiercache.errors import SetupError
from tiercache.mountinfo import mounts
from tiercache.tiers.place import refuse_filesystem, refuse_overlap, resolve

MARKER = "tiercache.json"
LOCK = "lock"
FORMAT = 1

_MARKER_DRAFT = "tiercache.json.new"
_EMPTY_NAMES = frozenset({"lost+found", _MARKER_DRAFT})
_RUNNING_SECONDS = 0.5  # a holder that says nothing of leaving: long enough for one that was just killed, below a second
_POLL_SECONDS = 0.05

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class Marker(msgspec.Struct, frozen=True):
    format: int
    uuid: str


class Holder(msgspec.Struct, frozen=True):
    """What the lock file says. `state` is 'running' or 'stopping'."""

    pid: int
    mountpoint: str
    state: str


class Claim:
    """The right to `path`, until `release` or the end of this process. `uuid` is the directory's for its life.

    `fresh`: the directory had no marker before, so nothing in it is worth looking for.
    """

    def __init__(self, path: Path, marker: Marker, lock_fd: int, holder: Holder, *, fresh: bool) -> None:
        self.path = path
        self.uuid = marker.uuid
        self.fresh = fresh
        self._holder = holder
        self._lock_fd: int | None = lock_fd

    def stopping(self) -> None:
        """Tell whoever comes next that it is worth waiting for us. Raises SetupError when the disk does not take it."""
        if self._lock_fd is not None:
            self._holder = msgspec.structs.replace(self._holder, state="stopping")
            _write_holder(self._lock_fd, self._holder, self.path)

    def release(self) -> None:
        """Give the right back. Idempotent."""
        if self._lock_fd is not None:
            lock_fd, self._lock_fd = self._lock_fd, None
            os.close(lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def claim(path: Path, *, mountpoint: Path, others: Sequence[tuple[str, Path]] = (), patience_seconds: float = 10.0) -> Claim:
    """Claim `path` as a cache directory, creating it (0700) if it is missing. Blocks, at most `patience_seconds` and a little.

    `others` are (what it is, where) of everything that must lie neither inside nor around it: replicas, `file://`
    sources, other hot directories; the mount point is added. Raises SetupError.
    """
    table = mounts()
    home = resolve(path, table)
    for what, where in [("mount point", mountpoint), *others]:
        refuse_overlap(home, what, resolve(where, table), table)
    refuse_filesystem(home, table)
    _refuse_nesting(home)
    _make(home)
    _refuse_foreign(home)
    holder = Holder(os.getpid(), os.fsencode(mountpoint).decode("utf-8", "replace"), "running")
    lock_fd = _lock(home, patience_seconds)
    try:
        _write_holder(lock_fd, holder, home)
        found = _read_marker(home)
        if found is None:
            _refuse_foreign(home)
        home.chmod(0o700)
        marker = found or _write_marker(home)
    except OSError as error:
        os.close(lock_fd)
        raise _unusable(home, error) from error
    except BaseException:
        os.close(lock_fd)
        raise
    return Claim(home, marker, lock_fd, holder, fresh=found is None)


# -- whose it is


def _refuse_nesting(home: Path) -> None:
    for above in home.parents:
        if os.path.lexists(above / MARKER):
            raise SetupError(
                f"cache directory {home} lies inside the cache directory {above}", hint="choose another one with --hot"
            )


def _make(home: Path) -> None:
    """Create what is missing of `home`, for its owner alone."""
    missing = [home, *home.parents]
    missing = missing[: next(position for position, each in enumerate(missing) if os.path.lexists(each))]
    for each in reversed(missing):
        try:
            each.mkdir(0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unusable(home, error) from error


def _refuse_foreign(home: Path) -> None:
    """Unless the directory is ours, or ours to take."""
    try:
        about = home.lstat()
        if not stat.S_ISDIR(about.st_mode):
            raise SetupError(f"cache directory {home} is not a directory", hint="choose another one with --hot")
        if about.st_uid != os.geteuid():
            owner, we = _user(about.st_uid), _user(os.geteuid())
            raise SetupError(
                f"cache directory {home} belongs to {owner}, not to {we}", hint=f"choose another one, or chown it to {we}"
            )
        names = set(os.listdir(home))
        foreign = sorted(names - _EMPTY_NAMES - {LOCK})
        if LOCK in names and MARKER not in names and not _is_our_lock(home / LOCK):
            foreign.append(LOCK)
    except OSError as error:
        raise _unusable(home, error) from error
    if MARKER in names:
        _read_marker(home)
    elif foreign:
        raise SetupError(
            f"cache directory {home} is not empty and not a cache of ours (it holds {foreign[0]!r} but no {MARKER})",
            hint="choose an empty or new directory with --hot",
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _is_our_lock(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISREG(about.st_mode) and (about.st_size == 0 or _decoded_holder(path.read_bytes()[:65536]) is not None)


def _read_marker(home: Path) -> Marker | None:
    """The directory's marker, None when there is none. Raises SetupError when it is not one that we can honour."""
    path = home / MARKER
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = msgspec.json.decode(file.read(65536), type=Marker)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(home, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(
            f"{path} is damaged: {error}", hint=f"if nothing but a cache is in {home}, empty it or choose another"
        ) from error
    if found.format > FORMAT:
        raise SetupError(
            f"cache directory {home} has format {found.format}, this program knows {FORMAT}",
            hint="use the newer tiercache that wrote it, or another directory",
        )
    return found


def _write_marker(home: Path) -> Marker:
    marker = Marker(FORMAT, str(uuid.uuid4()))
    draft = home / _MARKER_DRAFT
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(msgspec.json.encode(marker) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(home / MARKER)
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return marker


def _unusable(home: Path, error: OSError) -> SetupError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_ROOM:
        return SetupError(
            f"the disk of cache directory {home} is full ({reason})", hint="free space there or choose another with --hot"
        )
    if error.errno in _READ_ONLY:
        return SetupError(
            f"cache directory {home} is not writable ({reason})",
            hint=f"make it writable for {_user(os.geteuid())} or choose another with --hot",
        )
    if error.errno == errno.ENOTDIR:
        return SetupError(f"cache directory {home} is not a directory", hint="choose another one with --hot")
    return SetupError(f"cache directory {home} cannot be used ({reason})", hint="check its disk or choose another with --hot")


# -- one at a time


def _lock(home: Path, patience_seconds: float) -> int:
    path = home / LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _unusable(home, error) from error
    began = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                return fd
            holder = _decoded_holder(os.pread(fd, 65536, 0))
            waited = time.monotonic() - began
            leaving = holder is not None and (holder.state == "stopping" or _is_dying(holder.pid))
            if waited >= (patience_seconds if leaving else min(_RUNNING_SECONDS, patience_seconds)):
                raise _taken(home, holder, leaving)
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        os.close(fd)
        raise _unusable(home, error) from error
    except BaseException:
        os.close(fd)
        raise


def _taken(home: Path, holder: Holder | None, leaving: bool) -> SetupError:
    if holder is None:
        return SetupError(f"cache directory {home} is in use by another tiercache", hint="choose another one with --hot")
    state = "which is stopping but has not let go of it" if leaving else "which is running"
    return SetupError(
        f"cache directory {home} is in use by tiercache process {holder.pid} ({holder.mountpoint}), {state}",
        hint=f"tiercache umount {holder.mountpoint}, or choose another directory with --hot",
    )


def _is_dying(pid: int) -> bool:
    """Is this process gone, a zombie, or under a SIGKILL that it has not died of yet?"""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return fields["State"][0] in "ZX" or bool(pending & 1 << 8)


def _decoded_holder(raw: bytes) -> Holder | None:
    """None for a lock file that its holder has not written (completely) yet."""
    try:
        return msgspec.json.decode(raw, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write_holder(fd: int, holder: Holder, home: Path) -> None:
    raw = msgspec.json.encode(holder) + b"\n"
    try:
        os.pwrite(fd, raw, 0)
        os.ftruncate(fd, len(raw))
    except OSError as error:
        raise _unusable(home, error) from error
