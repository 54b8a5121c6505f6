"""Which daemon the arguments of a command mean, with what mountinfo knows: no mount is ever touched to find out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tiercache.admin.client import socket_path_of
from tiercache.admin.locate import Target, contains, daemon_of_paths, follow_links
from tiercache.admin.socket import socket_for
from tiercache.errors import UsageError
from tiercache.mountinfo import mounts

if TYPE_CHECKING:
    from tiercache.config import Config


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


def listening_socket(option: str | None) -> str | None:
    """Where a daemon that is started is to listen: `--socket`, else TIERCACHE_SOCKET, else None. '' stays, to be refused."""
    if option == "":
        return option
    chosen = socket_path_of(option)
    return None if chosen is None else str(chosen)


def places_of(config: Config) -> Iterator[tuple[str, str]]:
    """(what it is, path) of everything that the daemon opens while it serves its mount."""
    yield "the admin socket", config.admin.socket or str(socket_for(config.mount.point))
    yield from (("the cache directory", path) for path in config.hot.paths)
    yield from (("the warm target", path) for path in config.warm.targets)
    for dataset in config.datasets:
        if dataset.replica is not None:
            yield f"the replica of {dataset.name}", dataset.replica
        if dataset.cold.startswith("file://"):
            yield f"the source of {dataset.name}", dataset.cold.removeprefix("file://")


def refuse_inside(point: str, places: Iterable[tuple[str, str]]) -> None:
    """Raises UsageError for what lies inside the mount point once links are followed: the daemon would wait for itself."""
    for what, path in places:
        if contains(point, follow_links(path, {point, *_fuse_points()})):
            raise UsageError(f"{what} {path} lies inside the mount point {point}", hint="choose a place outside it")


def chosen_mount_point(mountpoint: str | None, config_file: str | None) -> str | None:
    """Of a command that takes MOUNTPOINT, or the configuration file of a service; None for neither. Raises UsageError."""
    if config_file is None:
        return None if mountpoint is None else mount_point(mountpoint)
    if mountpoint is not None:
        raise UsageError("MOUNTPOINT and --config contradict each other", hint="give one of them")
    from tiercache.config import load

    return mount_point(load(config_file).mount.point)


def _fuse_points() -> set[str]:
    return {mount.path for mount in mounts() if mount.is_fuse}
