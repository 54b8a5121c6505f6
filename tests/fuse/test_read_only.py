"""Nothing can be written, by nobody and by no means: EROFS, and the bucket is as before."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting


def _open(flags: int) -> Callable[[Path], object]:
    return lambda path: os.open(path, flags)


WRITES: dict[str, Callable[[Path], object]] = {
    "open-rdwr": _open(os.O_RDWR),
    "open-wronly": _open(os.O_WRONLY),
    "open-append": _open(os.O_WRONLY | os.O_APPEND),
    "open-truncate": _open(os.O_WRONLY | os.O_TRUNC),
    "open-rdonly-truncate": _open(os.O_RDONLY | os.O_TRUNC),
    "create": lambda path: os.open(path.parent / "new", os.O_CREAT | os.O_WRONLY),
    "create-exclusive": lambda path: os.open(path.parent / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR),
    "tmpfile": lambda path: os.open(path.parent, os.O_TMPFILE | os.O_RDWR),
    "truncate": lambda path: os.truncate(path, 0),
    "unlink": lambda path: path.unlink(),
    "rename": lambda path: path.rename(path.parent / "new"),
    "rename-over": lambda path: path.rename(path.parent / "other"),
    "mkdir": lambda path: (path.parent / "new").mkdir(),
    "rmdir": lambda path: path.parent.rmdir(),
    "symlink": lambda path: (path.parent / "new").symlink_to(path),
    "link": lambda path: (path.parent / "new").hardlink_to(path),
    "mknod": lambda path: os.mknod(path.parent / "new"),
    "mkfifo": lambda path: os.mkfifo(path.parent / "new"),
    "chmod": lambda path: path.chmod(0o777),
    "chown": lambda path: os.chown(path, 1, 1),
    "utime": lambda path: os.utime(path, (1, 1)),
    "setxattr": lambda path: os.setxattr(path, "user.tiercache.residency", b"hot"),
    "removexattr": lambda path: os.removexattr(path, "user.tiercache.residency"),
}


@pytest.fixture
def filled(bucket: Bucket, mounting: Mounting) -> Mount:
    bucket.put("dir/file", b"content")
    bucket.put("dir/other", b"other")
    return mounting(bucket)


def test_every_kind_of_write_is_refused_as_read_only(filled: Mount, bucket: Bucket) -> None:
    path = filled.root / "dir" / "file"
    for read_before in (False, True):
        refused = {}
        for name, write in WRITES.items():
            with pytest.raises(OSError) as caught:  # noqa: PT011
                write(path)
            refused[name] = errno.errorcode[caught.value.errno or 0]
        assert refused == dict.fromkeys(WRITES, "EROFS"), f"read before: {read_before}"
        assert path.read_bytes() == b"content"
    assert sorted(os.listdir(path.parent)) == ["file", "other"]
    listed = bucket.account.client.list_objects_v2(Bucket=bucket.name)["Contents"]
    assert {item["Key"]: item["Size"] for item in listed} == {"dir/file": 7, "dir/other": 5}


def test_a_shared_writable_mapping_is_refused_and_a_private_one_stays_private(filled: Mount) -> None:
    path = filled.root / "dir" / "file"
    with open(path, "rb") as file:
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        assert file.read() == b"content"  # the page is in the kernel's cache: the fault below asks nobody
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as private:
            private[:3] = b"CON"
            assert private[:] == b"CONtent"
    assert path.read_bytes() == b"content"


def test_remounting_read_write_does_not_help(filled: Mount) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(filled.point)], capture_output=True, timeout=30, check=False)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        os.open(filled.root / "dir" / "file", os.O_RDWR)
    assert caught.value.errno == errno.EROFS
