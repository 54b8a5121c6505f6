"""Which daemon the arguments of a command mean, with what mountinfo knows: no mount is ever touched to find out."""

from __future__ import annotations

import os

from tiercache.admin.locate import Target, daemon_of_paths, follow_links
from tiercache.errors import UsageError
from tiercache.mountinfo import mounts


def target_of(socket: str | None, paths: list[str]) -> Target:
    """The daemon that all `paths` belong to. Raises NoDaemon, UsageError, Unavailable."""
    return daemon_of_paths(socket, paths, _fuse_points())


def mount_point(text: str) -> str:
    """MOUNTPOINT as mountinfo writes it: absolute and without symbolic links, whether it is mounted, hung or missing."""
    if not text or "\0" in text:
        raise UsageError(f"MOUNTPOINT {text!r} is not a path", hint="give a directory")
    try:
        absolute = os.path.abspath(text)
    except FileNotFoundError as error:
        raise UsageError(f"{text!r} is relative to a directory that was removed", hint="give an absolute path") from error
    return follow_links(absolute, _fuse_points())


def _fuse_points() -> set[str]:
    return {mount.path for mount in mounts() if mount.is_fuse}
