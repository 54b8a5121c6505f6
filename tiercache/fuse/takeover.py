"""A mount without its daemon: which one is ours to take over, and what becomes of one that is not.

Nobody answers on such a mount, so it is told by the number of its connection (see `supervision.py`) and never touched.
"""

from __future__ import annotations

import os

import structlog

from tiercache.detaching import abandon, is_connected
from tiercache.errors import SetupError
from tiercache.fuse.mountpoint import FUSE_DEVICE, prepare_mount_point
from tiercache.fuse.session import Connection, Session
from tiercache.mountinfo import Mount, mounts, visible_at
from tiercache.supervision import Kept, drop

log = structlog.get_logger()


def place_for(path: str, kept: Kept | None) -> str | None:
    """Where to mount, free of symbolic links; None when what was kept is not mounted any more. Blocks. Raises SetupError."""
    if kept is None:
        return prepare_mount_point(path).path
    mount = _mount_of(kept.number) if is_connected(kept.fuse_fd) else None
    if mount is None:
        drop(kept.number)
        return None
    return mount.path


def connect(session: Session, kept: Kept | None) -> None:
    """Take over what was kept, or mount. Blocks. Raises SetupError, with nothing mounted."""
    if kept is None or not _taken_over(session, kept):
        session.mount()


def keepsake(session: Session, point: str) -> Kept | None:
    """What is to be kept of a session that has answered its first request; None when a successor could not use it."""
    connection, mount = session.connection, visible_at(point)
    if connection is None or mount is None:
        return None
    return Kept(connection.fuse_fd, connection.table_fd, mount.connection_number)


def _taken_over(session: Session, kept: Kept) -> bool:
    """When the connection is refused it is ended: its users see ENOTCONN, and the mount point is free."""
    try:
        session.take_over(Connection(kept.fuse_fd, kept.table_fd))
    except SetupError as error:
        log.warning("connection_refused", error=error.line)
        drop(kept.number)
        end_connection(kept.number)
        _let_go(kept.fuse_fd)
        return False
    return True


def _let_go(fuse_fd: int) -> None:
    """The last holder's closing ends a connection that could not be aborted. The session may own the number and close it."""
    try:
        is_ours = os.fstat(fuse_fd).st_rdev == os.stat(FUSE_DEVICE).st_rdev
    except OSError:
        return
    if is_ours:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, fuse_fd, inheritable=False)
        os.close(nothing)


def end_connection(number: int) -> None:
    """Abort it, and leave nothing of its mount. It must not have ended long ago, or the number is another's."""
    mount = _mount_of(number)
    if mount is not None:
        log.warning("mount_abandoned", mountpoint=mount.path, complaint=abandon(mount))


def _mount_of(number: int) -> Mount | None:
    return next((mount for mount in mounts() if mount.is_fuse and mount.connection_number == number), None)
