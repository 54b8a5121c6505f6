"""A private mount namespace: what is done to mounts in it nobody else sees, and it takes all of them along when it ends.

Used where the machine itself must look different to the program: without /dev/fuse, or as an ordinary user's machine looks. A
checkout and its interpreter may lie in a home directory that is closed to other users (root's is); the room opens the
way to them and to nothing else there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fuse.mount import REPOSITORY, Ran, run

NOBODY = 65534
_END_SECONDS = 10


class Room:
    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]

    def run(self, command: Sequence[str | os.PathLike[str]], env: Mapping[str, str], *, uid: int = 0) -> Ran:
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        return run([*self._enter, *user, *command], env)

    def tiercache(self, *arguments: str | os.PathLike[str], env: Mapping[str, str], uid: int = 0) -> Ran:
        return self.run([sys.executable, "-m", "tiercache", *arguments], env, uid=uid)

    def is_mounted(self, point: Path) -> bool:
        table = self.run(["cat", "/proc/self/mountinfo"], {"PATH": os.environ["PATH"]}).out
        return any(line.split(" ")[4] == str(point) for line in table.splitlines())


@contextmanager
def room(stage: Path, *commands: str) -> Iterator[Room]:
    """`commands` (of the shell, by root) furnish it. `stage` is an empty directory for what they need."""
    script = "\n".join(["set -e", *commands, "echo ready", "exec cat"])
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=stage,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"ready\n", "the room cannot be furnished"
        yield Room(holder.pid)
    finally:
        holder.kill()
        holder.wait(_END_SECONDS)
        holder.stdin.close()
        holder.stdout.close()


def without_device() -> list[str]:
    """An empty /dev but for what Python needs."""
    return [
        "mount -t tmpfs -o mode=755 tmpfs /dev",
        "mknod -m 666 /dev/null c 1 3",
        "mknod -m 666 /dev/urandom c 1 9",
    ]


def for_users() -> list[str]:
    """What an unprivileged user finds on an ordinary machine: /dev/fuse as udev makes it, and programs that may be read."""
    commands = ["mknod -m 666 fuse c 10 229", "mount --bind fuse /dev/fuse"]
    wanted = {REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    closed: dict[Path, list[Path]] = {}
    for directory in sorted(wanted):
        way = [*reversed(directory.parents), directory]
        barrier = next((each for each in way if not each.stat().st_mode & 0o001), None)
        if barrier is not None:
            closed.setdefault(barrier, []).append(directory)
    for barrier, directories in closed.items():
        quoted = [(f"open-{number}", shlex.quote(str(directory))) for number, directory in enumerate(directories)]
        for held, path in quoted:
            commands += [f"mkdir -p {held}", f"mount --bind {path} {held}"]
        commands.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(barrier))}")
        for held, path in quoted:
            commands += [f"mkdir -p {path}", f"mount --move {held} {path}"]
    return commands
