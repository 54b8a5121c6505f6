"""Whose a target's directory is: the marker in it, and what this node remembers of it. Nobody's data is ever taken for a target.

A directory is a target when it holds the marker `tiercache-target.json`: format, uuid, and weight (the size of the file system
when it was made one: the same for all nodes, whatever they see now). There is no lock: nodes share it. A directory is *made* a
target, and a missing one is made at all, in two cases only:

* it is new: nothing is remembered of this path, and it is empty (or missing, in a parent that exists);
* it was emptied or deleted, or its marker was damaged: what is remembered of the path lies on the same file system. It gets the
  same uuid again. Files that are not ours, and no marker, are somebody's: never touched.

Empty and on another file system than remembered means that something is not mounted. Nothing is written there.

A file system is known by its id (f_fsid of statfs). Where it has none (NFS, FUSE) type and source of the mount stand for it. XFS
makes it from the device number, which a reboot may change: a target is then still known by its marker, but one that was emptied
stays down until what is remembered of it is deleted.

Of two nodes that make the same directory a target at once one wins: the marker is linked into place. Where there are no hard
links it is renamed, the last one wins, and the other node hears of it with its next probe, which takes whatever valid
marker it finds. Calls block, and raise OSError for what the file system says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from tiercache.core.health import Usage, Writing
from tiercache.errors import SetupError
from tiercache.mountinfo import mounts
from tiercache.tiers import claim
from tiercache.tiers.place import filesystem_source, resolve
from tiercache.tiers.warm import files
from tiercache.tiers.warm.files import DRAFTS, MARKER, OURS, Vanished, open_root, opened, sync_directory

log = structlog.get_logger()

FORMAT = 1
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_NOT_EMPTY = re.compile(rf"(?!lost\+found$|{re.escape(MARKER)}\.[0-9a-f]{{32}}$)", re.DOTALL)
_MARKER_BYTES = 65536
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EXDEV, errno.EINVAL})


class NotThere(Exception):
    """No target here, at least not now. `str()` is what to show of it."""


class Foreign(NotThere):
    """It is somebody else's, or of a newer format: no target is to be expected here."""


class Marker(msgspec.Struct, frozen=True):
    format: int
    uuid: str
    weight_bytes: int


class _AnyMarker(msgspec.Struct, frozen=True):
    """What markers of all formats have."""

    format: int


class Identity(msgspec.Struct, frozen=True):
    """Who a target is, and the file system on which it was seen."""

    uuid: bytes
    weight_bytes: int
    filesystem: str


class Probed(msgspec.Struct, frozen=True):
    """`was_marked`: it has just been made a target (again). `reason`: why it could not be written."""

    identity: Identity
    was_marked: bool
    usage: Usage
    writing: Writing
    reason: str


def probe(path: str, remembered: Identity | None, *, may_write: bool) -> Probed:
    """Look at a target, making it one where that is right (see above). Raises NotThere, Vanished, OSError."""
    with opened(_root(path, remembered)) as root:
        identity, was_marked = _identify(root, _filesystem(root, path), remembered)
        usage = files.usage_of(root)
        writing, reason = _try_writing(root, path) if may_write or was_marked else ("untried", "")
    return Probed(identity, was_marked, usage, writing, reason)


def refuse_nesting(path: str) -> None:
    """Raises Foreign for a directory in a cache directory or in another target."""
    for above in Path(os.path.realpath(path)).parents:
        for marker, what in ((claim.MARKER, "cache directory"), (MARKER, "warm target")):
            if os.path.lexists(above / marker):
                raise Foreign(f"lies inside the {what} {above}")


def _root(path: str, remembered: Identity | None) -> int:
    with contextlib.suppress(Vanished):
        return open_root(path)
    if os.path.lexists(path):
        if os.path.isdir(path):  # another node has made it in this moment
            return open_root(path)
        raise Foreign("is not a directory")
    parent = os.path.dirname(os.path.abspath(path))
    try:
        above = open_root(parent)
    except Vanished:
        raise NotThere(f"does not exist, nor does {parent}") from None
    with opened(above):
        if remembered is not None and _filesystem(above, path) != remembered.filesystem:
            raise NotThere("does not exist: its file system is not mounted")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        sync_directory(above)
    return open_root(path)


def _filesystem(root: int, path: str) -> str:
    number = os.fstatvfs(root).f_fsid
    if number:
        return f"{number:x}"
    table = mounts()
    return filesystem_source(resolve(Path(path), table), table)


def _identify(root: int, filesystem: str, remembered: Identity | None) -> tuple[Identity, bool]:
    """Who it is, and whether it was made a target now."""
    known = remembered if remembered is not None and remembered.filesystem == filesystem else None
    raw, names = _read_marker(root), list[str]()
    if raw is None:
        names = sorted(filter(_NOT_EMPTY.match, _names(root)))
        raw = _read_marker(root) if names else None  # another node may be making it a target right now
    if raw is not None:
        found = _decoded(raw, filesystem)
        if found is not None:
            return found, False
        if known is None:
            raise Foreign(f"its marker {MARKER} is damaged")
        return _mark(root, known, is_damaged=True), True
    if known is not None and OURS.issuperset(names):
        return _mark(root, known, is_damaged=False), True
    if remembered is not None and known is None:
        raise NotThere("is not mounted: the directory has no marker and lies on another file system than before")
    if names:
        raise Foreign(f"is not empty and not a warm target (it holds {names[0]!r} but no {MARKER})")
    fresh = Identity(uuid.uuid4().bytes, files.usage_of(root).total_bytes, filesystem)
    return _mark(root, known or fresh, is_damaged=False), True


def _decoded(raw: bytes, filesystem: str) -> Identity | None:
    """None for a damaged one."""
    try:
        marked_format = msgspec.json.decode(raw, type=_AnyMarker).format
        if marked_format > FORMAT:
            raise Foreign(f"has format {marked_format}, this program knows {FORMAT}")
        found = msgspec.json.decode(raw, type=Marker)
        identity = uuid.UUID(found.uuid).bytes
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
    return Identity(identity, found.weight_bytes, filesystem) if found.format == FORMAT and found.weight_bytes >= 0 else None


def _names(root: int) -> list[str]:
    with opened(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)) as listed:
        return os.listdir(listed)


def _read_marker(root: int) -> bytes | None:
    """None when there is none; b'' for what is no file."""
    try:
        with opened(os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)) as file:
            return os.read(file, _MARKER_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return b""
        raise


def _mark(root: int, identity: Identity, *, is_damaged: bool) -> Identity:
    """Write the marker, unless another node was faster; who the target is now."""
    draft = f"{MARKER}.{uuid.uuid4().hex}"
    marker = Marker(FORMAT, str(uuid.UUID(bytes=identity.uuid)), identity.weight_bytes)
    try:
        with opened(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root)) as file:
            _write(file, msgspec.json.encode(marker) + b"\n")
            os.fsync(file)
        if is_damaged:
            os.rename(draft, MARKER, src_dir_fd=root, dst_dir_fd=root)
        else:
            _place(root, draft)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=root)
    _make_drafts(root)
    sync_directory(root)
    raw = _read_marker(root)
    found = None if raw is None else _decoded(raw, identity.filesystem)
    if found is None:
        raise NotThere(f"its marker {MARKER} changes")
    return found


def _place(root: int, draft: str) -> None:
    try:
        os.link(draft, MARKER, src_dir_fd=root, dst_dir_fd=root)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(draft, MARKER, src_dir_fd=root, dst_dir_fd=root)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _make_drafts(root: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(DRAFTS, 0o700, dir_fd=root)


def _try_writing(root: int, path: str) -> tuple[Writing, str]:
    try:
        _make_drafts(root)
        files.now_seconds(path)
    except OSError as error:
        text = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in NO_ROOM:
            return "full", text
        if error.errno in READ_ONLY:
            return "refused", f"not writable: {text}"
        raise
    return "done", ""


# -- what a node remembers


class _Kept(msgspec.Struct, frozen=True):
    uuid: str
    weight_bytes: int
    filesystem: str


def load_memory(path: Path) -> dict[str, Identity]:
    """By `memory_key` of the target's path. A file that is damaged, or not there, remembers nothing. Raises SetupError."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=dict[str, _Kept])
        return {key: Identity(uuid.UUID(each.uuid).bytes, each.weight_bytes, each.filesystem) for key, each in kept.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SetupError(f"{path} cannot be read ({reason})", hint="check the disk of the hot directory") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        log.warning("warm_targets_forgotten", path=str(path), error=str(error))
        return {}


def save_memory(path: Path, memory: Mapping[str, Identity]) -> None:
    """Durable, in one step."""
    kept = {key: _Kept(str(uuid.UUID(bytes=each.uuid)), each.weight_bytes, each.filesystem) for key, each in memory.items()}
    draft = path.with_name(path.name + ".new")
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode(kept))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    with opened(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as above:
        sync_directory(above)


def memory_key(path: str) -> str:
    """Paths need not be text."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
