"""Which daemon a command means, and what its paths are called there.

A path may be absolute, relative to the working directory, or `dataset/key`. It is made absolute here
without asking the kernel about anything at or below a mount point: a stat there may hang for as long as
the daemon does. So symbolic links are followed component by component, and only until the path
reaches a mount point (`/home/me/data -> /mnt/data` works, links inside the mount do not matter).
A relative path is one when it begins with `./` or `../`, or when the working directory is in a
mount; anything else is `dataset/key`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from tiercache.admin.client import Client, socket_path_of
from tiercache.admin.messages import Status
from tiercache.admin.socket import Answer, live_sockets, socket_for, sockets
from tiercache.errors import AccessDenied, NoDaemon, Unavailable, UsageError

_DENIED = "run this as the user who mounted, or have admin.group set to a group of yours"
MAX_LISTED = 8
MAX_LINKS = 40  # as the kernel's own limit (ELOOP)


class Target(msgspec.Struct, frozen=True):
    """A daemon and the paths as it is to be asked for them."""

    socket: Path
    paths: list[str]


def only_daemon(option: str | None) -> Path:
    """The chosen socket, else that of the only running daemon. Raises NoDaemon, UsageError."""
    chosen = socket_path_of(option)
    if chosen is not None:
        return chosen
    present = sockets()
    running = [socket for socket, answer in present.items() if answer is Answer.LIVE]
    if not running:
        denied = [socket for socket, answer in present.items() if answer is Answer.DENIED]
        if denied:
            raise NoDaemon(f"no daemon of yours is running, and {_listed(denied)} is not for you", hint=_DENIED)
        raise NoDaemon("no daemon is running", hint="start one with `tiercache mount`, or name its socket with --socket")
    if len(running) > 1:
        raise UsageError(f"{len(running)} daemons are running: {_listed(running)}", hint="choose one with --socket")
    return running[0]


def daemon_of_paths(option: str | None, paths: Sequence[str], fuse_points: Collection[str]) -> Target:
    """The one daemon that all the paths belong to. Raises NoDaemon, UsageError, Unavailable.

    `fuse_points` are where FUSE filesystems are mounted: paths are not looked at beyond them, not even for a daemon that hangs.
    """
    chosen = socket_path_of(option)
    if chosen is None and len(running := live_sockets()) > 1:
        found = _answering(running)
    else:
        only = only_daemon(option)
        with Client(only) as client:
            found = {only: client.status()}
    if not found:
        raise Unavailable(f"none of the running daemons answers: {_listed(running)}", hint="look at their logs")
    points = {status.mountpoint: socket for socket, status in found.items()}
    owners: dict[str, Path] = {}
    resolved = []
    for path in paths:
        full = resolve(path, {*points, *fuse_points})
        resolved.append(full)
        owners[path] = _owner(path, full, points, found)
    if len(set(owners.values())) > 1:
        first, second = list(dict.fromkeys(owners.values()))[:2]
        names = [next(path for path in paths if owners[path] == socket) for socket in (first, second)]
        raise UsageError(f"{names[0]!r} and {names[1]!r} belong to different mounts", hint="ask for one mount at a time")
    return Target(next(iter(owners.values())), resolved)


def daemon_of_mountpoint(option: str | None, mountpoint: str) -> Path | None:
    """The socket of the daemon that serves `mountpoint` (absolute, links resolved), None when there is none. Raises AccessDenied.

    TIERCACHE_SOCKET is only one more place to look: the mount point says already which daemon is meant.
    """
    if option is not None:
        return socket_path_of(option)
    present = sockets()
    usual = socket_for(mountpoint)
    if present.get(usual) is Answer.LIVE:
        return usual
    denied = [socket for socket, answer in present.items() if answer is Answer.DENIED and socket.name == usual.name]
    if denied:
        raise AccessDenied(f"the daemon of {mountpoint} belongs to another user", hint=_DENIED)
    running = [socket for socket, answer in present.items() if answer is Answer.LIVE]
    named = socket_path_of(None)
    candidates = running if named is None or named in running else [named, *running]
    return next((socket for socket, status in _answering(candidates).items() if status.mountpoint == mountpoint), None)


def resolve(path: str, mountpoints: Collection[str]) -> str:
    """Absolute when `path` is a path, unchanged when it is `dataset/key`. Touches nothing below a mount point."""
    if os.path.isabs(path):
        return follow_links(path, mountpoints)
    if path in (".", "..") or path.startswith(("./", "../")):
        return follow_links(os.path.join(_working_directory(path), path), mountpoints)
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return path
    if any(contains(point, here) for point in mountpoints):
        return os.path.abspath(os.path.join(here, path))
    return path


def contains(mountpoint: str, path: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def follow_links(path: str, mountpoints: Collection[str]) -> str:
    """`realpath` that stops looking as soon as it stands on a mount point."""
    pending = os.path.abspath(path).split("/")[:0:-1]
    current = "/"
    links = 0
    while pending:
        if current in mountpoints:
            return os.path.join(current, *reversed(pending))
        step = os.path.join(current, pending.pop())
        if step in mountpoints:
            current = step
            continue
        try:
            target = os.readlink(step)
        except (OSError, ValueError):
            current = step
            continue
        links += 1
        if links > MAX_LINKS:
            raise UsageError(f"{path!r} goes through more than {MAX_LINKS} symbolic links", hint="give the path without them")
        joined = os.path.abspath(os.path.join(current, target))
        pending += joined.split("/")[:0:-1]
        current = "/"
    return current


def _working_directory(path: str) -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UsageError(f"{path!r} is relative to a directory that was removed", hint="give an absolute path") from error


def _owner(path: str, full: str, points: dict[str, Path], found: dict[Path, Status]) -> Path:
    if os.path.isabs(full):
        holders = [point for point in points if contains(point, full)]
        if not holders:
            raise UsageError(f"{path!r} is not in a mount of tiercache", hint=f"mounted: {', '.join(sorted(points))}")
        return points[max(holders, key=len)]
    if len(found) == 1:
        return next(iter(found))
    dataset = full.split("/", 1)[0]
    owners = [socket for socket, status in found.items() if any(known.name == dataset for known in status.datasets)]
    if len(owners) == 1:
        return owners[0]
    how_many = "no running daemon has" if not owners else f"{len(owners)} running daemons have"
    raise UsageError(f"{how_many} a dataset {dataset!r}", hint="give a path under the mount point, or choose with --socket")


def _answering(sockets: Sequence[Path]) -> dict[Path, Status]:
    """Those that tell their status; a daemon that hangs or ends meanwhile must not spoil commands for the others."""
    found = {}
    for socket in sockets:
        with Client(socket) as client:
            try:
                found[socket] = client.status()
            except (Unavailable, NoDaemon, AccessDenied):
                continue
    return found


def _listed(sockets: Sequence[Path]) -> str:
    shown = ", ".join(str(socket) for socket in sockets[:MAX_LISTED])
    return shown if len(sockets) <= MAX_LISTED else f"{shown} and {len(sockets) - MAX_LISTED} more"
