"""First contact with the machine: can this process mount here? And what is mounted where.

Each check is one cause with its fix, made before anything is mounted and without touching the source.

A path below a mount whose daemon or server has gone may never answer: what /proc/self/mountinfo can tell is never asked of the
path, and everything else is asked in a thread that is left behind after `ANSWER_SECONDS`. (Such waits in
FUSE and NFS are killable, so the thread does not keep the process from exiting. A child process would cost
30 ms of interpreter start at every mount and has to be waited for too.)

A *stale* mount is one whose daemon died: every access gives ENOTCONN ("Transport endpoint is not
connected"). It is detached lazily, because processes may still stand in it, and the mount point used again.
"""

from __future__ import annotations

import enum
import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tiercache.detaching import NO_FUSERMOUNT, take_away
from tiercache.errors import SetupError
from tiercache.mountinfo import Mount, visible_at

ANSWER_SECONDS = 2.0  # local directories answer in microseconds, busy NFS servers in tens of milliseconds
MAX_STACKED = 16  # stale mounts on top of each other; each failed restart of a supervisor may have left one

FUSE_DEVICE = "/dev/fuse"
FUSE_CONF = "/etc/fuse.conf"
_INSTALL = "install it: apt-get install fuse3 (Debian, Ubuntu) or dnf install fuse3 (Fedora, RHEL)"
_IN_CONTAINER = "in a container: run it with --device /dev/fuse --cap-add SYS_ADMIN"
_CAP_SYS_ADMIN = 21
_STALE = (errno.ENOTCONN, errno.ECONNABORTED)

T = TypeVar("T")


class Health(enum.Enum):
    SERVED = "somebody answers"
    STALE = "its daemon has gone"
    SILENT = "no answer in time: its daemon hangs, or somebody else holds the connection of a dead one"


class MountPoint(msgspec.Struct, frozen=True):
    """A directory that is ready to be mounted on. `path` is free of symbolic links; `healed_count` stale mounts were detached."""

    path: str
    healed_count: int


def mount_at(path: str) -> Mount | None:
    """What is mounted exactly at `path` and visible there. Raises SetupError when the way to it does not answer."""
    point = os.path.abspath(path)
    found = visible_at(point)
    if found is None:
        resolved = _answer(path, lambda: os.path.realpath(point))
        found = visible_at(resolved) if resolved != point else None
    return found


def is_mounted(path: str) -> bool:
    return mount_at(path) is not None


def _answer(path: str, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises (OSError), or SetupError when it does not come back in time."""
    result: list[T] = []
    failure: list[OSError] = []

    def run() -> None:
        try:
            result.append(ask())
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"ask {path}", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if failure:
        raise failure[0]
    if not result:
        raise _silent(path)
    return result[0]


def _silent(path: str) -> SetupError:
    return SetupError(
        f"{path} does not answer within {ANSWER_SECONDS:g} s",
        hint="a file system there hangs: unmount it (umount -l) or choose another mount point",
    )


def check_fuse(*, allow_other: bool, device: str = FUSE_DEVICE, conf: str = FUSE_CONF) -> None:
    """That this process may mount FUSE file systems. Raises SetupError."""
    _check_device(device)
    if os.geteuid() == 0:
        _check_capability()
    else:
        _check_fusermount()
        if allow_other and not _allows_other(conf):
            raise SetupError(
                f"allow_other needs the line user_allow_other in {conf}",
                hint="have root add it, or mount without allow_other",
            )


def _check_device(device: str) -> None:
    """fusermount3 opens the device with the rights of its caller, so every user needs them."""
    try:
        if not stat.S_ISCHR(os.stat(device).st_mode):
            raise SetupError(f"{device} is not a character device", hint=f"remove it and run: modprobe fuse; {_IN_CONTAINER}")
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise SetupError(f"{device} does not exist", hint=f"run: modprobe fuse; {_IN_CONTAINER}") from error
    except OSError as error:
        match error.errno:
            case errno.ENODEV | errno.ENXIO:
                fix = f"run: modprobe fuse; {_IN_CONTAINER}"
            case errno.EACCES if os.geteuid() != 0:
                fix = f"have root run: chmod 666 {device} (which is udev's default)"
            case _:
                fix = _IN_CONTAINER
        raise SetupError(f"{device} cannot be opened: {error.strerror}", hint=fix) from error


def has_sys_admin() -> bool:
    """Has this process the capability CAP_SYS_ADMIN, which mounting without fusermount3 and backing files need?"""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return bool(effective >> _CAP_SYS_ADMIN & 1)


def _check_capability() -> None:
    if not has_sys_admin():
        raise SetupError("root without the capability CAP_SYS_ADMIN cannot mount", hint=_IN_CONTAINER)


def _check_fusermount() -> None:
    path = shutil.which("fusermount3")
    if path is None:
        raise SetupError("fusermount3 is not installed, and only root can mount without it", hint=_INSTALL)
    info = os.stat(path)
    setuid_root = info.st_mode & stat.S_ISUID and info.st_uid == 0
    if not setuid_root and "security.capability" not in os.listxattr(path):
        raise SetupError(f"{path} is not setuid root, so that it cannot mount", hint=f"have root run: chmod u+s {path}")


def _allows_other(conf: str) -> bool:
    try:
        with open(conf, encoding="utf-8", errors="replace") as file:
            return any(line.partition("#")[0].strip() == "user_allow_other" for line in file)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SetupError(f"{conf} cannot be read: {error.strerror}", hint="have root make it readable (mode 0644)") from error


def prepare_mount_point(path: str) -> MountPoint:
    """Check that `path` is an empty directory with nothing mounted on it, after detaching stale mounts. Raises SetupError."""
    point = os.path.abspath(path)
    healed = 0
    while (mount := mount_at(point)) is not None:
        state = health(mount) if mount.is_fuse else Health.SERVED
        if state is Health.SILENT:
            raise _silent(point)
        if healed == MAX_STACKED or state is Health.SERVED:
            raise SetupError(
                f"{point} is already a mount point ({mount.fstype}, {mount.source})",
                hint=f"unmount it (tiercache umount {point}) or choose another directory",
            )
        unmount(mount.path, lazy=True)
        healed += 1
    try:
        resolved = _answer(point, lambda: _check_directory(point))
    except FileNotFoundError as error:
        raise SetupError(f"mount point {point} does not exist", hint=f"run: mkdir -p {point}") from error
    except OSError as error:
        raise SetupError(f"mount point {point}: {error.strerror}", hint="choose an empty directory that you may enter") from error
    return MountPoint(resolved, healed)


def health(mount: Mount) -> Health:
    """The only question that is asked of a mount that may hang: one whose answer the kernel does not remember."""
    try:
        _answer(mount.path, lambda: os.statvfs(mount.path))
    except OSError as error:
        return Health.STALE if error.errno in _STALE else Health.SERVED
    except SetupError:
        return Health.SILENT
    return Health.SERVED


def _check_directory(point: str) -> str:
    """Runs in the thread of `_answer`: anything here may hang."""
    if not stat.S_ISDIR(os.stat(point).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory", point)
    with os.scandir(point) as entries:
        if next(entries, None) is not None:
            raise OSError(errno.ENOTEMPTY, "is not empty, and its files would be hidden", point)
    if os.geteuid() != 0:
        if not os.access(point, os.W_OK, effective_ids=True):
            raise OSError(errno.EACCES, "fusermount3 mounts only on directories that you may write to", point)
        info = os.stat(point)
        if info.st_mode & stat.S_ISVTX and info.st_uid != os.geteuid():
            raise OSError(errno.EACCES, "is sticky and not yours, so that fusermount3 refuses it", point)
    return os.path.realpath(point)


def unmount(path: str, *, lazy: bool = False) -> None:
    """Take the topmost mount at `path` away; `lazy` detaches it although files are open.

    Nothing mounted there (any more) is success: another party may have been quicker. Raises SetupError.
    """
    point = os.path.abspath(path)
    complaint = take_away(point, lazy=lazy)
    if complaint is None or not is_mounted(point):
        return
    if complaint == NO_FUSERMOUNT:
        raise SetupError(f"{complaint}, and only root can unmount without it", hint=_INSTALL)
    if "busy" in complaint:
        raise SetupError(
            f"{point} cannot be unmounted: files or directories there are in use",
            hint=f"close them (fuser -vm {point} lists the processes) and try again",
        )
    raise SetupError(f"{point} cannot be unmounted: {complaint}", hint=f"have root run: umount -l {point}")
