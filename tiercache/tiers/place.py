"""Where a cache directory may lie: on a local disk, apart from everything that is not its own. A warm target may be on a network.

Refused are memory (tmpfs), the network and FUSE (a cache there is no faster than what it caches, and locks lie),
and any place inside or around another cache, a replica, a source or a mount point: the cache would list, cache or
overwrite what is not its own.

Everything is decided on /proc/self/mountinfo: a path is resolved link by link but never touched at or below a
network or FUSE mount point, which may hang (it may be the dead mount that is about to be healed). `realpath` and
`st_dev` were rejected for that. Two paths lie inside each other when their names do, or when their
places in the same file system do: bind mounts hide the latter from names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiercache.errors import SetupError
from tiercache.mountinfo import FSTYPE, Mount

_MEMORY = frozenset(["tmpfs", "ramfs", "devtmpfs", "hugetlbfs"])
# fmt: off
_NETWORK = frozenset(
    [
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "virtiofs", "vboxsf", "vmhgfs",
        "autofs", "lustre", "ceph", "gpfs", "beegfs", "panfs", "ocfs2", "gfs2", "orangefs", "pvfs2", "glusterfs",
        "acfs", "wekafs",
    ]
)
# fmt: on
_PSEUDO = frozenset(
    ["proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "configfs", "securityfs", "bpf", "pstore", "mqueue"]
)
_LINKS = 40  # as many as the kernel follows


_HIDDEN_ROOT = Mount(0, 0, "", "/", "/", "", "", "")
"""What lies below no mount that we see: inside a chroot the root itself need not be one."""


def _may_hang(mount: Mount) -> bool:
    return mount.fstype in _NETWORK or mount.is_fuse


def _mount_of(path: Path, mounts: Sequence[Mount]) -> Mount:
    """The mount that `path` is on: the longest mount point above it, the topmost of those."""
    above = [mount for mount in mounts if path.is_relative_to(mount.path)]
    return max(reversed(above), key=lambda mount: len(mount.path.rstrip("/")), default=_HIDDEN_ROOT)


def resolve(path: Path, mounts: Sequence[Mount]) -> Path:
    """`path` absolute and without symbolic links, as far as that can be known without touching a mount that may hang."""
    todo = list(reversed((Path.cwd() / path).parts[1:]))
    done, links = Path("/"), 0
    while todo:
        step = todo.pop()
        if step == "..":
            done = done.parent
            continue
        here = done / step
        if _may_hang(_mount_of(here, mounts)):
            done = here
            continue
        try:
            target = os.readlink(here)
        except OSError:  # no link, or not there (yet)
            done = here
            continue
        links += 1
        if links > _LINKS:
            raise SetupError(f"{path} is a loop of symbolic links", hint="give the directory itself")
        parts = Path(target).parts
        if parts and parts[0] == "/":
            done, parts = Path("/"), parts[1:]
        todo.extend(reversed(parts))
    return done


def refuse_overlap(
    home: Path, what: str, other: Path, mounts: Sequence[Mount], *, role: str = "cache directory", option: str = "--hot"
) -> None:
    """Raises SetupError when one of the two resolved paths lies inside the other. `what` says what `other` is."""
    places = [(home, other)]
    mine, its = _mount_of(home, mounts), _mount_of(other, mounts)
    if mine.device == its.device:
        places.append((Path(mine.root) / home.relative_to(mine.path), Path(its.root) / other.relative_to(its.path)))
    for here, there in places:
        if here == there:
            relation = "is also"
        elif here.is_relative_to(there):
            relation = "lies inside"
        elif there.is_relative_to(here):
            relation = "contains"
        else:
            continue
        raise SetupError(f"{role} {home} {relation} the {what} {other}", hint=f"choose a directory apart from it with {option}")


def refuse_filesystem(home: Path, mounts: Sequence[Mount]) -> None:
    """Raises SetupError when `home` (resolved; it need not exist yet) would lie on anything but a local disk."""
    fstype = _mount_of(home, mounts).fstype
    if fstype in _MEMORY:
        kind = f"in memory ({fstype})"
    elif fstype in _NETWORK or fstype.startswith("fuse"):
        kind = f"on a network or FUSE file system ({fstype})"
    elif fstype in _PSEUDO:
        kind = f"on {fstype}, which stores nothing"
    else:
        return
    raise SetupError(f"cache directory {home} is {kind}", hint="choose a directory on a local disk with --hot")


def refuse_storage(home: Path, mounts: Sequence[Mount]) -> None:
    """Raises SetupError when a warm target at `home` (resolved) would not outlive the machine, or lie in a tiercache mount."""
    fstype = _mount_of(home, mounts).fstype
    if fstype in _MEMORY:
        kind = f"in memory ({fstype})"
    elif fstype in _PSEUDO:
        kind = f"on {fstype}, which stores nothing"
    elif fstype == FSTYPE:
        kind = "in a mount of tiercache itself"
    else:
        return
    raise SetupError(f"warm target {home} is {kind}", hint="choose a directory on flash, disk or a network file system")


def mount_number(home: Path, mounts: Sequence[Mount]) -> int:
    """Of the mount that `home` (resolved) is on: another one after every mount."""
    return _mount_of(home, mounts).mount_id


def filesystem_source(home: Path, mounts: Sequence[Mount]) -> str:
    """Type and source of the mount that `home` (resolved) is on: what tells network file systems apart that have no id."""
    mount = _mount_of(home, mounts)
    return f"{mount.fstype} {mount.source}"
