"""A real filesystem that hangs on demand: a small FUSE filesystem whose process is stopped by a signal.

Calls into it then wait in the kernel like calls to a dead NFS server, and go on when it is resumed.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Stalling:
    def __init__(self, mountpoint: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = mountpoint
        self._process = process

    def stop(self) -> None:
        """Every call waits from now on."""
        os.kill(self._process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while self._state() != "T":
            assert time.monotonic() < deadline, "the filesystem did not stop"
            os.sched_yield()

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def _state(self) -> str:
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2][0]


@contextmanager
def stalling(mountpoint: Path, files: dict[str, bytes]) -> Iterator[Stalling]:
    """Mount `files` (names without '/') at an empty directory, all with mtime 1,000,000,000 s."""
    source = mountpoint.parent / "stalling-source"
    source.mkdir()
    for name, data in files.items():
        (source / name).write_bytes(data)
    process = subprocess.Popen([sys.executable, __file__, str(source), str(mountpoint)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield Stalling(mountpoint, process)
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
        unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        subprocess.run([*unmount, str(mountpoint)], check=True, timeout=10)


def _serve(source: Path, mountpoint: Path) -> None:
    import pyfuse3
    import trio

    contents = [path.read_bytes() for path in sorted(source.iterdir())]
    names = [os.fsencode(path.name) for path in sorted(source.iterdir())]
    first = pyfuse3.ROOT_INODE + 1

    class Files(pyfuse3.Operations):
        async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
            attributes = pyfuse3.EntryAttributes()
            attributes.st_ino = inode
            attributes.st_nlink = 1
            attributes.attr_timeout = attributes.entry_timeout = 0
            attributes.st_mtime_ns = attributes.st_ctime_ns = attributes.st_atime_ns = 10**18
            if inode == pyfuse3.ROOT_INODE:
                attributes.st_mode = stat.S_IFDIR | 0o755
            else:
                attributes.st_mode = stat.S_IFREG | 0o644
                attributes.st_size = len(contents[inode - first])
            return attributes

        async def lookup(self, parent: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
            if name not in names:
                raise pyfuse3.FUSEError(errno.ENOENT)
            return await self.getattr(first + names.index(name))

        async def opendir(self, inode: int, ctx: object) -> int:
            return inode

        async def readdir(self, handle: int, start: int, token: pyfuse3.ReaddirToken) -> None:
            for position in range(start, len(names)):
                attributes = await self.getattr(first + position)
                if not pyfuse3.readdir_reply(token, names[position], attributes, position + 1):
                    return

        async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
            return pyfuse3.FileInfo(fh=inode, direct_io=True)

        async def read(self, handle: int, offset: int, size: int) -> bytes:
            return contents[handle - first][offset : offset + size]

    pyfuse3.init(Files(), str(mountpoint), {"fsname=stalling", "ro"})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    trio.run(pyfuse3.main)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
