"""What is mounted where, as /proc/self/mountinfo tells it (see proc(5)): no mount is ever touched to find out.

A leaf with small imports: the keeper reads it too, and its memory is that of a bare interpreter.
"""

from __future__ import annotations

import os
from typing import NamedTuple

FSTYPE = "fuse.tiercache"


class Mount(NamedTuple):
    """One line. `root` is the directory of the file system `device` that is visible at `path`; texts have surrogateescape."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    path: str
    fstype: str
    source: str
    options: str

    @property
    def is_fuse(self) -> bool:
        return self.fstype.startswith("fuse")

    @property
    def connection_number(self) -> int:
        """What the kernel calls the connection of a FUSE mount in /sys/fs/fuse/connections: its device number."""
        major, _, minor = self.device.partition(":")
        return int(major) << 20 | int(minor)


def mounts() -> list[Mount]:
    """All mounts of this process's namespace, in the kernel's order: where several share a path the top one is last."""
    with open("/proc/self/mountinfo", "rb") as file:
        return parse(file.read())


def parse(mountinfo: bytes) -> list[Mount]:
    return [_parse_line(line) for line in mountinfo.split(b"\n") if line]  # \r is not escaped


def _parse_line(line: bytes) -> Mount:
    """Optional fields lie before a lone '-'; blank, tab, newline, '#' and backslash are octal escapes."""
    before, _, after = line.partition(b" - ")
    mount_id, parent_id, device, root, path, options = before.split(b" ")[:6]
    fstype, source = after.split(b" ")[:2]
    return Mount(
        int(mount_id),
        int(parent_id),
        device.decode(),
        _unescaped(root),
        _unescaped(path),
        fstype.decode(),
        _unescaped(source),
        options.decode(),
    )


def _unescaped(field: bytes) -> str:
    head, *escaped = field.split(b"\\")
    return os.fsdecode(head + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in escaped))


def visible_at(point: str) -> Mount | None:
    """The mount that a walk to `point` (absolute, without symbolic links) ends on, when it is mounted right there.

    Mounts stack: on the same directory, and on directories above, which hides what was mounted below before.
    So the walk goes as the kernel's does: from each mount to the nearest one on the way that is mounted *on it*.
    """
    table = mounts()
    known = {mount.mount_id for mount in table}
    children: dict[int, list[Mount]] = {}
    for mount in table:
        rooted = mount.parent_id == mount.mount_id or mount.parent_id not in known
        children.setdefault(0 if rooted else mount.parent_id, []).append(mount)
    current: Mount | None = None
    while on_the_way := [
        mount
        for mount in children.pop(current.mount_id if current else 0, [])
        if mount.path == point or point.startswith(mount.path.rstrip("/") + "/")
    ]:
        current = min(on_the_way, key=lambda mount: len(mount.path))
    return current if current is not None and current.path == point else None
