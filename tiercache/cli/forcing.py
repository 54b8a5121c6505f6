"""`umount --force`: end a mount whatever state it is in, with its processes, asking neither the mount nor the daemon for help.

First the connection is aborted and the mount detached: all who wait get an error, and a daemon that still runs sees its end and
stops cleanly. The keeper and the daemon that do not, because they hang or are stopped, are killed. They are found by their
sockets, whose peer the kernel names, never by a name.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack

from tiercache.cli.processes import have_ended, process_of
from tiercache.errors import NoDaemon, SetupError, TiercacheError, Unavailable, UsageError

CLEAN_SECONDS = 5.0
KILLED_SECONDS = 10.0


def force(point: str, socket: str | None) -> bool:
    """True when something was mounted. Raises SetupError, AccessDenied, UsageError."""
    from tiercache.admin.socket import keeper_pid

    with ExitStack() as stack:
        keeper = stack.enter_context(process_of(keeper_pid(point)))
        daemon = stack.enter_context(process_of(_daemon_pid(point, socket)))
        was_mounted = _detach(point)
        running = [process for process in (keeper, daemon) if process is not None]
        for process in running:
            process.send(signal.SIGTERM)
        if not have_ended(running, CLEAN_SECONDS):
            for process in running:  # the keeper first: it must not start another one
                process.send(signal.SIGKILL, group=process is keeper)
            if not have_ended(running, KILLED_SECONDS):
                pids = ", ".join(str(process.pid) for process in running)
                raise Unavailable(
                    f"{point}: detached, but its processes ({pids}) do not end", hint="look at dmesg: a disk may hang"
                )
        _sweep(point)
        return was_mounted


def _daemon_pid(point: str, socket: str | None) -> int | None:
    """Who listens on the mount's admin socket; one that was named and serves another mount is refused, as far as it says so."""
    from tiercache.admin.client import Client, socket_path_of
    from tiercache.admin.socket import listener_pid, peer_pid, socket_for

    usual, named = listener_pid(socket_for(point).name), socket_path_of(socket)
    if named is None or (socket is None and usual is not None):
        return usual
    with Client(named) as client:
        try:
            served = client.status().mountpoint
        except (NoDaemon, Unavailable):
            served = point
    if served != point and socket is None:  # TIERCACHE_SOCKET is only one more place to look
        return None
    if served != point:
        raise UsageError(f"the daemon on {named} serves {served}, not {point}", hint="leave --socket out, or correct it")
    try:
        return peer_pid(named)
    except OSError:
        return None


def _detach(point: str) -> bool:
    from tiercache.detaching import abandon
    from tiercache.mountinfo import FSTYPE, visible_at

    mount = visible_at(point)
    if mount is None:
        return False
    if mount.fstype != FSTYPE:
        raise SetupError(
            f"{point} is a mount of {mount.source} ({mount.fstype}), not of tiercache", hint="unmount it with umount(8)"
        )
    complaint = abandon(mount)
    if complaint is not None and visible_at(point) == mount:
        raise TiercacheError(f"{point} cannot be detached: {complaint}", hint=f"have root run: umount -l {point}")
    return True


def _sweep(point: str) -> None:
    """The socket files that a killed process could not remove."""
    from tiercache.admin.socket import Answer, answer_of, keeper_socket_for, socket_for

    for path in (keeper_socket_for(point), socket_for(point)):
        if answer_of(path) is Answer.DEAD:
            path.unlink(missing_ok=True)
