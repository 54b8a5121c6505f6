"""Taking a mount away by its path, and a FUSE connection by its number: nothing here asks the mount itself anything.

So it works on a mount whose daemon hangs, is stopped or is gone while somebody else holds its connection. The last
component of a path given to umount2(2) is not looked into, and MNT_FORCE has FUSE abort the connection: whoever waits
for an answer gets ECONNABORTED or ENOTCONN at once. Its number serves those who may not unmount, and mounts that were
detached already: the file `abort` of the connection belongs to the user who mounted.

A leaf with small imports, for the keeper.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from tiercache.mountinfo import Mount

CONNECTIONS = "/sys/fs/fuse/connections"
FUSERMOUNT_SECONDS = 10.0
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8

NO_FUSERMOUNT = "fusermount3 is not installed"


def is_connected(fuse_fd: int) -> bool:
    """Does this descriptor of /dev/fuse belong to a connection that has not ended?

    The number of one that ended is no longer its own: the kernel gives it to the next mount anywhere.
    """
    poll = select.poll()
    poll.register(fuse_fd, 0)
    return not poll.poll(0)  # an error is reported without being asked for


def abort(number: int) -> None:
    """End a connection, if the file system of connections is mounted (it need not be) and this user may write there."""
    with suppress(OSError), open(f"{CONNECTIONS}/{number}/abort", "wb", buffering=0) as file:
        file.write(b"1")


def abandon(mount: Mount) -> str | None:
    """End the connection of a FUSE mount and detach it, whatever state it is in; the complaint if it is still there."""
    abort(mount.connection_number)
    return take_away(mount.path, lazy=True, force=True)


def take_away(point: str, *, lazy: bool = False, force: bool = False) -> str | None:
    """Unmount the topmost mount at `point`; what the system complains about, None after success.

    `lazy` detaches it although files are open; `force` aborts its connection first (fusermount3 cannot).
    """
    if os.geteuid() == 0:
        return _umount2(point, _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if force else 0))
    return _fusermount(point, lazy)


def _umount2(point: str, flags: int) -> str | None:
    import ctypes  # a tenth of a keeper's memory

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(point), flags) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def _fusermount(point: str, lazy: bool) -> str | None:
    import subprocess  # as above

    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", point]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FUSERMOUNT_SECONDS, check=False)
    except FileNotFoundError:
        return NO_FUSERMOUNT
    except subprocess.TimeoutExpired:
        return f"fusermount3 did not end within {FUSERMOUNT_SECONDS:g} s"
    if done.returncode == 0:
        return None
    return os.fsdecode(done.stderr).strip().rpartition(": ")[2] or f"fusermount3 ended with status {done.returncode}"
