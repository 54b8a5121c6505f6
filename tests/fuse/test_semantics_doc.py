"""docs/semantics.md, sentence by sentence: each is quoted, must still stand there, and must be true on a real mount."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuse.bucket import Bucket, new_bucket
from tests.fuse.mount import REPOSITORY, Mounting, drop_caches
from tests.servers.moto import Moto
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy
from tests.servers.scripted import error_reply

MIB = 1 << 20
_DOC = " ".join((REPOSITORY / "docs" / "semantics.md").read_text(encoding="utf-8").split())


def says(*sentences: str) -> None:
    for sentence in sentences:
        assert " ".join(sentence.split()) in _DOC, f"docs/semantics.md does not say (any more): {sentence}"


def errno_of(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def residency(path: Path) -> bytes:
    return os.getxattr(path, "user.tiercache.residency")


def test_names(moto: Moto, mounting: Mounting) -> None:
    says(
        "It is reachable under exactly its own bytes when each component is a name that POSIX allows",
        "| `a//b`, `../up`, `./x` | a component is empty, `.` or `..`: unreachable, with all that is below it (counted as one) |",
        "| a component of more than 255 bytes | unreachable |",
        "| `x` beside `x/1` | `x` is a directory, since it leads to more keys; the object `x` is unreachable |",
        "| `dir/` of no bytes (a marker) | the directory `dir` exists, even when it is empty |",
        "| `dir/` with content | the directory exists; the content is unreachable |",
    )
    bucket = new_bucket(moto)
    for key in ("a//b", "a//c", "../up", "./x", "n" * 256, "x", "x/1", "100%+ ", "empty/", "a/kept"):
        bucket.put(key, b"" if key == "empty/" else b"content")
    bucket.put("full/", b"content")
    mount = mounting(bucket)
    assert sorted(os.listdir(mount.root)) == ["100%+ ", "a", "empty", "full", "x"]
    assert [os.listdir(mount.root / name) for name in ("a", "empty", "full", "x")] == [["kept"], [], [], ["1"]]
    says("The count is `UNREACHABLE` in `tiercache status` and the metric `tiercache_unreachable_keys`.")
    assert mount.status()["datasets"][0]["unreachable_count"] == 6  # a//, ../, ./, the long name, x, the content of full/
    assert "UNREACHABLE" in mount.tiercache("status").out


def test_links_of_a_directory_source(mounting: Mounting, tmp_path: Path) -> None:
    says(
        "In a `file://` source directories exist by themselves; a link to a file inside the source is followed; "
        "links to directories, links that lead out, sockets, pipes and devices are not shown."
    )
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "file").write_bytes(b"content")
    (tmp_path / "outside").write_bytes(b"secret")
    (source / "inside-link").symlink_to("file")
    (source / "directory-link").symlink_to("empty")
    (source / "outside-link").symlink_to(tmp_path / "outside")
    os.mkfifo(source / "pipe")
    os.mknod(source / "device", 0o20600, os.makedev(1, 3))
    mount = mounting(f"file://{source}")
    assert sorted(os.listdir(mount.root)) == ["empty", "file", "inside-link"]
    assert (mount.root / "inside-link").read_bytes() == b"content"
    for hidden in ("directory-link", "outside-link", "pipe", "device"):
        assert errno_of((mount.root / hidden).lstat) == "ENOENT"


def test_attributes(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("dir/file", b"x" * 1000)
    listed = bucket.account.client.list_objects_v2(Bucket=bucket.name)["Contents"][0]
    mount = mounting(bucket)
    says(
        "A file has the size and the modification time (in whole seconds) that the store shows.",
        "Access and change time are the same.",
    )
    info = (mount.root / "dir/file").stat()
    stamp = int(listed["LastModified"].timestamp())
    assert (info.st_size, info.st_mtime_ns, info.st_atime_ns, info.st_ctime_ns) == (1000, *[stamp * 10**9] * 3)
    says("they show 1 January 1970. Their link count is 1.")
    above = (mount.root / "dir").stat()
    assert (above.st_mtime, above.st_nlink) == (0, 1)
    says("`st_blocks` is the size in blocks of 512 bytes, whether or not the file is on the local disk.")
    assert info.st_blocks == 2
    says("by default the user that runs the daemon, `0444` for files and `0555` for directories.")
    assert (info.st_uid, info.st_mode & 0o7777, above.st_mode & 0o7777) == (os.geteuid(), 0o444, 0o555)
    says("`df` shows 1 PiB, all of it used: a bucket has no size.")
    whole = os.statvfs(mount.root)
    assert (whole.f_blocks * whole.f_frsize, whole.f_bavail) == (1 << 50, 0)
    says("It does not change because something was cached, evicted, remounted, or because the cache was lost.")
    (mount.root / "dir/file").read_bytes()
    mount.umount()
    subprocess.run(["rm", "-r", str(mount.hot)], check=True, timeout=30)
    mount.start()
    assert ((mount.root / "dir/file").stat().st_ino, (mount.root / "dir").stat().st_ino) == (info.st_ino, above.st_ino)
    says("A new version has a new number.")
    bucket.put("dir/file", b"y" * 1000)
    assert mount.tiercache("refresh", mount.root / "dir/file").code == 0
    assert (mount.root / "dir/file").stat().st_ino != info.st_ino


def test_owner_and_modes_are_those_of_the_configuration(bucket: Bucket, mounting: Mounting) -> None:
    says("Owner, group and permission bits are those of the configuration", "The kernel checks them (`default_permissions`).")
    bucket.put("dir/file", b"content")
    mount = mounting(bucket, options=["-o", "uid=1234,gid=4321,file_mode=0440,dir_mode=0550"])
    info = (mount.root / "dir/file").stat()
    assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (1234, 4321, 0o440)
    assert (mount.root / "dir").stat().st_mode & 0o7777 == 0o550

    def read_as(uid: int, gid: int) -> bytes:
        """From within the mount: the test's own directory is closed to other users."""
        command = ["setpriv", "--clear-groups", f"--reuid={uid}", f"--regid={gid}", "cat", "dir/file"]
        return subprocess.run(command, cwd=mount.root, capture_output=True, timeout=30, check=False).stdout

    assert (read_as(1234, 9), read_as(5, 4321), read_as(5, 5)) == (b"content", b"content", b"")


def test_extended_attributes(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    says(
        "| `user.tiercache.residency` | the tiers that have it: `hot,cold`, `hot(3/64),cold` when 3 of 64 chunks are hot, "
        "or `cold` |",
        "| `user.tiercache.version` | the version tag: ETag and size",
        "or `xxh3-chunks:`, the chunk size, and the xxh3-64 of the chunks' digests |",
    )
    etag = bucket.put("small", b"x" * 1000)
    bucket.put("large", random.Random(1).randbytes(24 * MIB))
    mount = mounting(bucket, via=proxy, settings={"policy": {"whole_file": "1MiB", "read_ahead": "8MiB"}})
    small, large = mount.root / "small", mount.root / "large"
    assert residency(small) == b"cold"
    assert os.getxattr(small, "user.tiercache.version") == f"{etag}:1000".encode()
    small.read_bytes()
    wait_until(lambda: residency(small) == b"hot,cold", "a hot copy")
    assert os.getxattr(small, "user.tiercache.checksum").startswith(b"xxh3:")
    with open(large, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(4096)
        wait_until(lambda: residency(large) == b"hot(1/3),cold", "the first chunk")
    large.read_bytes()
    wait_until(lambda: residency(large) == b"hot,cold", "all chunks")
    assert os.getxattr(large, "user.tiercache.checksum").startswith(f"xxh3-chunks:{8 * MIB}:".encode())


def test_writing(bucket: Bucket, mounting: Mounting) -> None:
    says("The mount is read-only: the kernel answers EROFS to everything that would change something.")
    bucket.put("file", b"content")
    mount = mounting(bucket)
    for write in (
        lambda: os.open(mount.root / "file", os.O_RDWR),
        (mount.root / "file").unlink,
        (mount.root / "new").mkdir,
        (mount.root / "new").touch,
    ):
        assert errno_of(write) == "EROFS"


def test_freshness(bucket: Bucket, mounting: Mounting) -> None:
    says(
        "A new object is visible after `negative_ttl` if somebody had looked for it before; otherwise at once where its "
        "directory has not been listed, and after `metadata_ttl` where it has.",
        "An overwritten or deleted object is noticed after `metadata_ttl` at the latest, or after a `refresh`.",
        "`tiercache refresh PATH` asks now.",
        "Overwriting with equal size is noticed too",
        "A complete hot copy is opened without a question while its name is fresh.",
    )
    bucket.put("listed/old", b"old")
    mount = mounting(bucket, settings={"mount": {"metadata_ttl": "3s", "negative_ttl": "1s"}})
    assert not (mount.root / "sought").exists()
    bucket.put("sought", b"x")
    bucket.put("never-sought", b"x")
    assert (mount.root / "never-sought").exists()
    wait_until((mount.root / "sought").exists, "the negative answer's end", 3.0)
    listed_at = time.monotonic()
    assert os.listdir(mount.root / "listed") == ["old"]
    assert (mount.root / "listed/old").read_bytes() == b"old"
    wait_until(lambda: residency(mount.root / "listed/old") == b"hot,cold", "a hot copy")
    bucket.put("listed/new", b"new")
    bucket.put("listed/old", b"OLD")
    assert not (mount.root / "listed/new").exists() or time.monotonic() - listed_at > 3
    assert (mount.root / "listed/old").read_bytes() == b"old" or time.monotonic() - listed_at > 3
    assert mount.tiercache("refresh", mount.root / "listed").code == 0
    assert (mount.root / "listed/old").read_bytes() == b"OLD"
    assert (mount.root / "listed/new").read_bytes() == b"new"
    bucket.put("listed/old", b"Old")
    bucket.delete("listed/new")
    deadline = time.monotonic() + 3.2
    wait_until(lambda: (mount.root / "listed/old").read_bytes() == b"Old", "the new version", deadline - time.monotonic())
    wait_until(lambda: not (mount.root / "listed/new").exists(), "the deletion", max(0.1, deadline - time.monotonic()))


def test_open_files_and_versions(bucket: Bucket, mounting: Mounting) -> None:
    says(
        "An open file is one version, for as long as it is open.",
        "what is in the hot tier (or in the kernel's page cache) goes on being readable. For bytes that can no longer be had the "
        "read fails with ESTALE. Open the file again for the new version.",
        "`mmap` for reading works.",
    )
    old, new = random.Random(1).randbytes(24 * MIB), random.Random(2).randbytes(24 * MIB)
    bucket.put("file", old)
    mount = mounting(bucket, settings={"policy": {"whole_file": "1MiB", "read_ahead": "8MiB"}})
    with open(mount.root / "file", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(file.fileno(), 4096, 0) == old[:4096]
        wait_until(lambda: residency(mount.root / "file").startswith(b"hot(1/3)"), "the first chunk")
        bucket.put("file", new)
        assert os.pread(file.fileno(), 4096, 5 * MIB) == old[5 * MIB : 5 * MIB + 4096]
        assert errno_of(lambda: os.pread(file.fileno(), 4096, 20 * MIB)) == "ESTALE"
        assert (mount.root / "file").read_bytes() == new
        with mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ) as mapped:
            assert mapped[:] == old[:4096]  # a page of the kernel's cache: nobody has to serve the fault


def test_errors(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    for number in range(4):
        bucket.put(f"file-{number}", b"content")
    mount = mounting(bucket, via=proxy, settings={"cold": {"deadline": "2s"}})
    assert len(os.listdir(mount.root)) == 4

    def opened_while(answer: bytes, number: int) -> str:
        proxy.intercept = lambda seen: answer
        return errno_of((mount.root / f"file-{number}").read_bytes)

    says("| EACCES | the store denies access, or the credentials are missing, wrong or expired |")
    assert opened_while(error_reply(403, "AccessDenied").raw, 0) == "EACCES"
    says("| EREMOTEIO | the object is in an archive class and has to be restored first |")
    assert opened_while(error_reply(403, "InvalidObjectState").raw, 1) == "EREMOTEIO"
    says("| EIO | the store could not be reached, was overloaded, or answered nonsense, until the deadline had passed")
    assert opened_while(error_reply(503, "SlowDown").raw, 2) == "EIO"
    assert opened_while(b"", 3) == "EIO"
    says("| ENOENT | the store said that the object does not exist. Never because of a failure |")
    assert errno_of((mount.root / "elsewhere/file").stat) == "ENOENT"  # the listing of the root is fresh and shows no such name
    says("A directory whose listing fails is never shown as empty")
    bucket.put("dir/file", b"x")
    proxy.intercept = lambda _: None
    assert mount.tiercache("refresh", mount.root).code == 0
    proxy.intercept = lambda _: b""
    assert errno_of(lambda: os.listdir(mount.root / "dir")) == "EIO"


def test_directories(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    for number in range(30):
        bucket.put(f"a/b/{number:02d}", b"x")
    mount = mounting(bucket, via=proxy)
    says("Opening one file in a directory that was never listed does not list it: a lookup costs one request a path component.")
    with proxy.recording() as seen:
        assert (mount.root / "a/b/07").read_bytes() == b"x"
    assert [request.query["prefix"] for request in seen.lists] == ["a", "a/b", "a/b/07"]
    assert len(seen.gets) == 1
    says("The second time it comes from the index.")
    assert len(os.listdir(mount.root / "a/b")) == 30
    drop_caches()
    with proxy.recording() as seen:
        assert len(os.listdir(mount.root / "a/b")) == 30
    assert seen.requests == []
    says("When a program looks up many names one by one, the directory is listed in the background.")
    mount.umount()
    subprocess.run(["rm", "-r", str(mount.hot)], check=True, timeout=30)
    mount.start()
    with proxy.recording() as seen:
        for number in range(30):
            assert (mount.root / f"a/b/{number:02d}").stat().st_size == 1
    assert len(seen.lists) < 20


def test_space(bucket: Bucket, mounting: Mounting, tmp_path: Path) -> None:
    says(
        "Files up to `whole_file` (64 MiB) are fetched whole once a byte of them is read.",
        "Small reads at random places of a large file fetch only their own pages",
        "An evicted file disappears from the disk as a whole. Descriptors of the mount are not affected.",
    )
    body = random.Random(1).randbytes(24 * MIB)
    bucket.put("whole", body)
    bucket.put("large", random.Random(2).randbytes(65 * MIB))
    mount = mounting(bucket, hot_size="40MB")
    with open(mount.root / "large", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 4096, 33 * MIB)
    assert residency(mount.root / "large") == b"cold"
    handle = os.open(mount.root / "whole", os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(handle, 1, 12 * MIB) == body[12 * MIB : 12 * MIB + 1]
        wait_until(lambda: residency(mount.root / "whole") == b"hot,cold", "the whole file")
        (mount.root / "large").read_bytes()
        assert os.pread(handle, MIB, 3 * MIB) == body[3 * MIB : 4 * MIB]
    finally:
        os.close(handle)


def test_a_store_that_is_gone(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    for key in ("hot", "known", "dir/known"):
        bucket.put(key, random.Random(len(key)).randbytes(20 * MIB if key == "known" else 1000))
    mount = mounting(bucket, via=proxy, settings={"cold": {"deadline": "2s"}, "mount": {"metadata_ttl": "1s"}})
    body = (mount.root / "hot").read_bytes()
    wait_until(lambda: residency(mount.root / "hot") == b"hot,cold", "a hot copy")
    assert (mount.root / "known").stat().st_size == 20 * MIB
    assert os.listdir(mount.root / "dir") == ["known"]
    proxy.stop()
    wait_until(lambda: "store_silent" in mount.log_text() or not (mount.root / "hot").exists(), "the end of the time to live")
    says(
        "Files that are complete in the hot tier go on being read, through descriptors that are open and by new opens, "
        "however long the outage is: a name that was known is believed for as long as the store is silent."
    )
    drop_caches()
    assert (mount.root / "hot").read_bytes() == body
    assert os.listdir(mount.root / "dir") == ["known"]
    says("A name that was not known fails with EIO.")
    assert errno_of((mount.root / "dir/unknown").stat) == "EIO"
    says(
        "a read of bytes that are not hot fails after the deadline; an `open` before it may wait for two seconds more, because "
        "it asks whether the version is the present one."
    )
    began = time.monotonic()
    assert errno_of((mount.root / "known").read_bytes) == "EIO"
    assert time.monotonic() - began < 2.0 + 2.0 + 1.5
    proxy.start()
    assert (mount.root / "dir/known").read_bytes() == random.Random(9).randbytes(1000)


def test_hits_are_counted_by_opens(bucket: Bucket, mounting: Mounting) -> None:
    says("is that of opens: the part that found the whole file hot.")
    bucket.put("file", b"content")
    mount = mounting(bucket)
    (mount.root / "file").read_bytes()
    wait_until(lambda: residency(mount.root / "file") == b"hot,cold", "a hot copy")
    for _ in range(3):
        (mount.root / "file").read_bytes()
    assert mount.status()["datasets"][0]["hits_ratio"] == 0.75
