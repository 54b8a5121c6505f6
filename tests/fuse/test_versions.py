"""Objects that change in the bucket: no fresh open sees old bytes for long, no open handle ever a mixture."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket, new_bucket
from tests.fuse.mount import Mount, Mounting
from tests.servers.moto import Moto
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy
from tests.servers.scripted import error_reply

MIB = 1 << 20
TTL_SECONDS = 1.0
SHORT = {"mount": {"metadata_ttl": f"{TTL_SECONDS:g}s", "negative_ttl": "1s"}, "cold": {"deadline": "2s"}}


def version(number: int, size_bytes: int) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def refresh(mount: Mount, path: Path) -> None:
    ran = mount.tiercache("refresh", path)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("new_bytes", [300_000, 5], ids=["same-size", "smaller"])
@pytest.mark.parametrize("cached", ["names", "content"])
def test_case_01_overwritten_while_the_old_metadata_is_cached(
    bucket: Bucket, mounting: Mounting, new_bytes: int, cached: str
) -> None:
    old, new = version(1, 300_000), version(2, new_bytes)
    bucket.put("file", old)
    mount = mounting(bucket, settings=SHORT)
    path = mount.root / "file"
    assert path.stat().st_size == len(old)
    if cached == "content":
        assert path.read_bytes() == old
    bucket.put("file", new)
    written_at = time.monotonic()
    while True:
        began = time.monotonic()
        found = path.read_bytes()  # never ESTALE, never EIO
        assert found in (old, new)
        if began > written_at + TTL_SECONDS + 0.05:
            assert found == new
            break
    assert path.stat().st_size == len(new)


@pytest.mark.parametrize("new_bytes", [300_000, 2 * MIB], ids=["same-size", "larger"])
def test_case_01_after_a_refresh_nobody_sees_the_old_bytes(bucket: Bucket, mounting: Mounting, new_bytes: int) -> None:
    old, new = version(1, 300_000), version(2, new_bytes)
    bucket.put("dir/file", old)
    mount = mounting(bucket)
    path = mount.root / "dir" / "file"
    assert path.read_bytes() == old
    bucket.put("dir/file", new)
    bucket.put("dir/more", b"more")
    assert path.read_bytes() == old  # within its time to live it is served from the hot copy
    refresh(mount, mount.root / "dir")
    assert path.read_bytes() == new
    assert (mount.root / "dir" / "more").read_bytes() == b"more"


def test_case_02_deleted_while_cached(bucket: Bucket, mounting: Mounting) -> None:
    body = version(1, 3 * MIB)
    bucket.put("dir/file", body)
    bucket.put("dir/other", b"other")
    mount = mounting(bucket, settings=SHORT)
    path = mount.root / "dir" / "file"
    with open(path, "rb", buffering=0) as handle:
        assert os.pread(handle.fileno(), len(body), 0) == body
        bucket.delete("dir/file")

        def is_gone() -> bool:
            try:
                path.stat()
            except FileNotFoundError:
                return True
            return False

        wait_until(is_gone, "ENOENT", TTL_SECONDS + 4)
        assert os.listdir(mount.root / "dir") == ["other"]
        with pytest.raises(FileNotFoundError):
            path.open("rb")
        assert os.pread(handle.fileno(), len(body), 0) == body


def test_case_02_a_directory_whose_last_object_is_deleted_goes(moto: Moto, mounting: Mounting) -> None:
    bucket = new_bucket(moto)  # SeaweedFS goes on listing a directory that has become empty
    bucket.put("dir/file", b"x")
    bucket.put("stays", b"y")
    mount = mounting(bucket)
    assert sorted(os.listdir(mount.root)) == ["dir", "stays"]
    bucket.delete("dir/file")
    refresh(mount, mount.root)
    assert os.listdir(mount.root) == ["stays"]
    with pytest.raises(FileNotFoundError):
        (mount.root / "dir").stat()


@pytest.mark.parametrize("new_bytes", [32 * MIB, 20 * MIB, 40 * MIB], ids=["same-size", "shrunk", "grown"])
def test_case_03_changed_between_two_range_gets_of_one_handle(bucket: Bucket, mounting: Mounting, new_bytes: int) -> None:
    old, new = version(1, 32 * MIB), version(2, new_bytes)
    bucket.put("file", old)
    mount = mounting(bucket, settings={"policy": {"whole_file": "1MiB", "read_ahead": "8MiB"}, **SHORT})
    with open(mount.root / "file", "rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(handle.fileno(), 4096, 0) == old[:4096]
        bucket.put("file", new)
        stale_count = 0
        for offset in range(0, 32 * MIB, MIB):
            try:
                found = os.pread(handle.fileno(), 65536, offset)
            except OSError as error:
                assert error.errno == errno.ESTALE  # noqa: PT017
                stale_count += 1
            else:
                assert found == old[offset : offset + 65536]
        assert stale_count > 0, "the handle reads on although its version is gone: from where?"
        assert os.pread(handle.fileno(), 4096, 0) == old[:4096]
        wait_until(lambda: (mount.root / "file").stat().st_size == len(new), "the new size", 5)
        assert (mount.root / "file").read_bytes() == new
        assert os.pread(handle.fileno(), 4096, 0) == old[:4096]


@pytest.mark.parametrize("seconds", [2.5, pytest.param(60.0, marks=pytest.mark.soak)])
def test_case_03_readers_of_an_object_that_keeps_changing_see_whole_versions(
    bucket: Bucket, mounting: Mounting, seconds: float
) -> None:
    sizes = [3 * MIB, 3 * MIB, 200, 9 * MIB + 1, 8 * MIB]

    def body(number: int) -> bytes:
        return bytes([number % 251]) * sizes[number % len(sizes)]

    bucket.put("file", body(0))
    mount = mounting(bucket, settings=SHORT)
    newest, until = 0, time.monotonic() + seconds
    ended = threading.Event()
    wrong: list[str] = []
    read_counts = [0, 0, 0]

    def read(position: int) -> None:
        while not ended.is_set() and not wrong:
            try:
                found = (mount.root / "file").read_bytes()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    wrong.append(f"errno {error.errno}")
                continue
            read_counts[position] += 1
            numbers = {number for number in range(newest + 2) if number % 251 == found[0]}
            if len(set(found)) != 1 or len(found) not in {sizes[number % len(sizes)] for number in numbers}:
                wrong.append(f"{len(found)} bytes of {sorted(set(found))}")

    readers = [threading.Thread(target=read, args=(position,)) for position in range(3)]
    for reader in readers:
        reader.start()
    try:
        while (time.monotonic() < until or newest <= 3 or min(read_counts) == 0) and not wrong:
            assert time.monotonic() < until + 60, f"{newest} versions, read {read_counts} times"
            bucket.put("file", body(newest + 1))
            newest += 1
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert wrong == []


def test_case_04_the_page_cache_of_an_old_version_does_not_show_through(bucket: Bucket, mounting: Mounting) -> None:
    old, new = version(1, 2 * MIB), version(2, 2 * MIB)
    bucket.put("file", old)
    mount = mounting(bucket)
    path = mount.root / "file"
    with open(path, "rb", buffering=0) as before:
        assert before.read() == old
        bucket.put("file", new)
        refresh(mount, path)
        with open(path, "rb", buffering=0) as after:
            assert os.fstat(after.fileno()).st_ino != os.fstat(before.fileno()).st_ino
            for _ in range(2):
                assert os.pread(after.fileno(), 2 * MIB, 0) == new
                assert os.pread(before.fileno(), 2 * MIB, 0) == old


def test_case_05_a_throttled_listing_is_an_error_and_never_an_empty_directory(
    bucket: Bucket, proxy: Proxy, mounting: Mounting
) -> None:
    for number in range(5):
        bucket.put(f"dir/{number}", b"x")
    mount = mounting(bucket, via=proxy, settings=SHORT)
    proxy.intercept = lambda seen: error_reply(503, "SlowDown").raw if seen.is_list else None
    for path in (mount.root, mount.root / "dir"):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            os.listdir(path)
        assert caught.value.errno == errno.EIO
    with pytest.raises(OSError) as caught:  # noqa: PT011
        (mount.root / "dir" / "0").stat()
    assert caught.value.errno == errno.EIO
    proxy.intercept = lambda _: None
    assert os.listdir(mount.root) == ["dir"]
    assert sorted(os.listdir(mount.root / "dir")) == ["0", "1", "2", "3", "4"]


def test_an_object_that_appears_is_seen_after_the_negative_time_to_live(bucket: Bucket, mounting: Mounting) -> None:
    mount = mounting(bucket, settings=SHORT)
    path = mount.root / "late"
    assert not path.exists()
    bucket.put("late", b"here")
    wait_until(path.exists, "the new object", 4)
    assert path.read_bytes() == b"here"
