"""A real directory seen through a small FUSE file system that fails on demand: a warm target on a server that has trouble.

`fail` says what every call comes to from now on: 'hang' (no answer before that has changed), or the name of an errno, for all
calls ('EIO') or for those that write ('EROFS', 'ENOSPC').
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITE_FAULTS = ("EROFS", "ENOSPC", "EDQUOT", "EACCES")


class Mirrored:
    """`path` is the mount point, `source` the directory that it shows."""

    def __init__(self, path: Path, source: Path, control: Path) -> None:
        self.path = path
        self.source = source
        self._control = control

    def fail(self, fault: str) -> None:
        draft = self._control.with_suffix(".new")
        draft.write_text(fault)
        draft.rename(self._control)

    def work(self) -> None:
        self.fail("")


@contextmanager
def mirrored(mountpoint: Path) -> Iterator[Mirrored]:
    """Mount `<mountpoint>-source`, which is made when missing, at `mountpoint`."""
    source, control = (mountpoint.with_name(mountpoint.name + suffix) for suffix in ("-source", "-fault"))
    mountpoint.mkdir(exist_ok=True)
    source.mkdir(exist_ok=True)
    control.write_text("")
    made = Mirrored(mountpoint, source, control)
    process = subprocess.Popen([sys.executable, __file__, str(source), str(mountpoint), str(control)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield made
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
        unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        subprocess.run([*unmount, str(mountpoint)], check=True, timeout=10)


def _serve(source: Path, mountpoint: Path, control: Path) -> None:
    import pyfuse3
    import trio

    async def pass_or_fail(*, writes: bool = False) -> None:
        while (fault := control.read_text()) == "hang":  # noqa: ASYNC110, ASYNC240 - another process changes it
            await trio.sleep(0.01)
        if fault and (writes or fault not in WRITE_FAULTS):
            raise pyfuse3.FUSEError(getattr(errno, fault))

    class Mirror(pyfuse3.Operations):
        """Inode numbers are given as paths become known; a renamed path keeps its number."""

        enable_writeback_cache = False

        def __init__(self) -> None:
            super().__init__()
            self._paths: dict[int, bytes] = {pyfuse3.ROOT_INODE: os.fsencode(source)}
            self._inodes = {path: inode for inode, path in self._paths.items()}

        def _below(self, parent: int, name: bytes) -> bytes:
            return os.path.join(self._paths[parent], name)

        def _attributes(self, path: bytes) -> pyfuse3.EntryAttributes:
            with _errors(pyfuse3.FUSEError):
                found = os.lstat(path)
            return self._of(self._number(path), found)

        def _number(self, path: bytes) -> int:
            inode = self._inodes.setdefault(path, len(self._paths) + 1000)
            self._paths[inode] = path
            return inode

        def _of(self, inode: int, found: os.stat_result) -> pyfuse3.EntryAttributes:
            attributes = pyfuse3.EntryAttributes()
            attributes.st_ino = inode
            attributes.entry_timeout = attributes.attr_timeout = 0
            for name in ("mode", "nlink", "uid", "gid", "size", "blocks", "atime_ns", "mtime_ns", "ctime_ns"):
                setattr(attributes, f"st_{name}", getattr(found, f"st_{name}"))
            return attributes

        async def lookup(self, parent: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
            await pass_or_fail()
            return self._attributes(self._below(parent, name))

        async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
            await pass_or_fail()
            return self._attributes(self._paths[inode])

        async def setattr(
            self, inode: int, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields, fh: int | None, ctx: object
        ) -> pyfuse3.EntryAttributes:
            await pass_or_fail(writes=True)
            if fields.update_size:
                os.truncate(self._paths[inode], attr.st_size)
            return self._attributes(self._paths[inode])

        async def mkdir(self, parent: int, name: bytes, mode: int, ctx: object) -> pyfuse3.EntryAttributes:
            await pass_or_fail(writes=True)
            with _errors(pyfuse3.FUSEError):
                os.mkdir(self._below(parent, name), mode)
            return self._attributes(self._below(parent, name))

        async def unlink(self, parent: int, name: bytes, ctx: object) -> None:
            await pass_or_fail(writes=True)
            with _errors(pyfuse3.FUSEError):
                os.unlink(self._below(parent, name))
            self._inodes.pop(self._below(parent, name), None)

        async def rmdir(self, parent: int, name: bytes, ctx: object) -> None:
            await pass_or_fail(writes=True)
            with _errors(pyfuse3.FUSEError):
                os.rmdir(self._below(parent, name))
            self._inodes.pop(self._below(parent, name), None)

        async def rename(
            self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: object
        ) -> None:  # pyfuse3's order of arguments
            await pass_or_fail(writes=True)
            before, after = self._below(parent, name), self._below(new_parent, new_name)
            with _errors(pyfuse3.FUSEError):
                os.rename(before, after)
            inode = self._inodes.pop(before, None)
            if inode is not None:
                self._inodes[after], self._paths[inode] = inode, after

        async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
            await pass_or_fail(writes=bool(flags & (os.O_WRONLY | os.O_RDWR)))
            with _errors(pyfuse3.FUSEError):
                return pyfuse3.FileInfo(fh=os.open(self._paths[inode], flags & ~os.O_CREAT), direct_io=True)

        async def create(
            self, parent: int, name: bytes, mode: int, flags: int, ctx: object
        ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
            await pass_or_fail(writes=True)
            with _errors(pyfuse3.FUSEError):
                handle = os.open(self._below(parent, name), flags | os.O_CREAT | os.O_TRUNC, mode)
            return pyfuse3.FileInfo(fh=handle, direct_io=True), self._attributes(self._below(parent, name))

        async def read(self, handle: int, offset: int, size: int) -> bytes:
            await pass_or_fail()
            return os.pread(handle, size, offset)

        async def write(self, handle: int, offset: int, data: bytes) -> int:
            await pass_or_fail(writes=True)
            return os.pwrite(handle, data, offset)

        async def fsync(self, handle: int, datasync: bool) -> None:
            await pass_or_fail(writes=True)

        async def fsyncdir(self, handle: int, datasync: bool) -> None:
            await pass_or_fail(writes=True)

        async def release(self, handle: int) -> None:
            os.close(handle)

        async def opendir(self, inode: int, ctx: object) -> int:
            await pass_or_fail()
            return inode

        async def readdir(self, inode: int, start: int, token: pyfuse3.ReaddirToken) -> None:
            await pass_or_fail()
            names = sorted(os.listdir(self._paths[inode]))
            for position, name in enumerate(names[start:], start + 1):
                with suppress(pyfuse3.FUSEError):
                    if not pyfuse3.readdir_reply(token, name, self._attributes(self._below(inode, name)), position):
                        return

        async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
            await pass_or_fail()
            found, reply = os.statvfs(source), pyfuse3.StatvfsData()
            for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax"):
                setattr(reply, f"f_{name}", getattr(found, f"f_{name}"))
            return reply

    pyfuse3.init(Mirror(), str(mountpoint), {"fsname=mirrored", "default_permissions"})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    trio.run(pyfuse3.main)


@contextmanager
def _errors(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(error.errno) from None


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
