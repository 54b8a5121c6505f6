"""`umount`: take a mount away with its daemon, or heal what a dead daemon left.

The daemon is asked to unmount, because it knows what is being written and because a member of the
socket's group may stop a daemon without being allowed to unmount. Without a daemon the mount is taken away
here. A mount in use is left as it is: a lazy unmount would report success while
processes still read, and the next mount would stand beside the old one. `--force` is for all that this cannot end.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiercache.cli import output
from tiercache.cli.options import Json, Socket
from tiercache.cli.processes import Process, process_of
from tiercache.errors import NoDaemon, SetupError, Unavailable, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.mountinfo import Mount

GONE_SECONDS = 30.0
POLL_SECONDS = 0.05
MAX_HOLDERS = 5


class Unmounted(msgspec.Struct, frozen=True):
    """What `umount --json` prints. `was_mounted` False: there was nothing to do. `healed`: there was no daemon any more."""

    mountpoint: str
    was_mounted: bool
    healed: bool


def umount(
    mountpoint: Annotated[str | None, typer.Argument(metavar="MOUNTPOINT")] = None,
    config_file: Annotated[str | None, typer.Option("--config", metavar="FILE", help="Of the mount point.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Detach a mount that hangs or is in use, and end its daemon. Programs get errors.")
    ] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Unmount and stop the daemon. Not mounted is fine; a stale mount point is repaired."""
    from tiercache.admin.locate import daemon_of_mountpoint
    from tiercache.cli.forcing import force as end_by_force
    from tiercache.cli.target import chosen_mount_point

    point = chosen_mount_point(mountpoint, config_file)
    if point is None:
        raise UsageError("MOUNTPOINT is missing", hint="give the directory to unmount")
    if force:
        done: Unmounted | None = Unmounted(point, end_by_force(point, socket), False)
    else:
        try:
            address = daemon_of_mountpoint(socket, point)
            done = None if address is None else _stop(address, point)
        except Unavailable as error:
            raise Unavailable(str(error), hint=f"look at its log, or run: tiercache umount --force {point}") from error
    if done is None:
        done = _heal(point)
    if as_json:
        output.json_document(done)
    elif done.was_mounted:
        output.line(f"{point}: unmounted" + (" (its daemon had gone)" if done.healed else ""))
    else:
        output.line(f"{point}: not mounted")


def _stop(address: Path, point: str) -> Unmounted | None:
    """None when nobody answers there after all. Raises SetupError when the mount is busy, Unavailable when the daemon hangs."""
    from tiercache.admin.client import Client
    from tiercache.admin.socket import peer_pid
    from tiercache.fuse.mountpoint import mount_at

    try:
        with process_of(peer_pid(address)) as process, Client(address) as client:
            served = client.status().mountpoint
            if served != point:
                raise UsageError(
                    f"the daemon on {address} serves {served}, not {point}", hint="leave --socket out, or correct it"
                )
            before = mount_at(point)
            client.stop()
            _await_gone(point, before, address, process)
    except (NoDaemon, ConnectionRefusedError, FileNotFoundError, ProcessLookupError):
        return None
    except SetupError as error:
        raise _busy(point, error) from error
    return Unmounted(point, True, False)


def _await_gone(point: str, before: Mount | None, address: Path, process: Process | None) -> None:
    """Until neither the mount nor the daemon is there: only then the cache directory and the mount point are free again.

    The kernel gives the id of a mount that is gone to the next one anywhere, so the path has to be the same too.
    """
    from tiercache.admin.socket import Answer, answer_of
    from tiercache.mountinfo import mounts

    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        mounted = before is not None and any((mount.mount_id, mount.path) == (before.mount_id, before.path) for mount in mounts())
        alive = answer_of(address) is Answer.LIVE if process is None else not process.has_ended()
        if not mounted and not alive:
            return
        time.sleep(POLL_SECONDS)
    what = "still mounted" if mounted else "unmounted, but its daemon still runs"
    raise Unavailable(f"{point}: {what} after {GONE_SECONDS:.0f} s", hint="look at the daemon's log")


def _heal(point: str) -> Unmounted:
    from tiercache.fuse.mountpoint import Health, health, mount_at, unmount

    mount = mount_at(point)
    if mount is None:
        return Unmounted(point, False, False)
    if not mount.is_fuse:
        raise SetupError(
            f"{point} is a mount of {mount.source} ({mount.fstype}), not of tiercache", hint="unmount it with umount(8)"
        )
    is_stale = health(mount) is Health.STALE  # else its daemon listens on a socket that nobody named, and ends with its mount
    try:
        unmount(point, lazy=is_stale)
    except SetupError as error:
        raise _busy(point, error) from error
    return Unmounted(point, True, is_stale)


def _busy(point: str, error: SetupError) -> SetupError:
    """The same error with the processes that hold the mount, as far as this user can see them."""
    names = holders(point)
    if not names:
        return error
    more = f" and {len(names) - MAX_HOLDERS} more" if len(names) > MAX_HOLDERS else ""
    return SetupError(
        f"{point} is in use by {', '.join(names[:MAX_HOLDERS])}{more}",
        hint="end them or let them close their files, then try again",
    )


def holders(point: str) -> list[str]:
    """Processes with a file, a working directory or a root there: `python (pid 42)`. Links in /proc are read, not followed."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if any(target == point or target.startswith(point.rstrip("/") + "/") for target in _links(pid)):
            found.append(f"{_command(pid)} (pid {pid})")
    return found


def _links(pid: str) -> list[str]:
    targets = []
    try:
        names = [
            f"/proc/{pid}/cwd",
            f"/proc/{pid}/root",
            *(f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")),
        ]
    except OSError:  # ended meanwhile, or another user's
        return []
    for name in names:
        try:
            targets.append(os.readlink(name))
        except OSError:
            continue
    return targets


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return os.fsdecode(file.read().strip())
    except OSError:
        return "a process"
