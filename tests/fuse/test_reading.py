"""Reading a bucket through a mount: all of it, exactly, each byte fetched once, and never again."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mounting, difference, drop_caches
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy

MIB = 1 << 20


def make_tree(root: Path, *, small_count: int, large_bytes: int) -> int:
    """Files of 0 B, 1 B, 100 KiB and one large one, with names that every store keeps apart; how many."""
    rng = random.Random(small_count)
    for number in range(small_count):
        place = root / f"class-{number % 7:02d}" / ("deep/er" if number % 5 == 0 else ".")
        place.mkdir(parents=True, exist_ok=True)
        size = (0, 1, 100 * 1024)[number % 3]
        (place / f"sample {number:05d}+ä.bin").write_bytes(rng.randbytes(size))
    (root / "large.bin").write_bytes(rng.randbytes(large_bytes))
    return small_count + 1


def find_count(root: Path) -> int:
    done = subprocess.run(["find", str(root), "-type", "f"], check=True, capture_output=True, timeout=300)
    return len(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("small_count", "large_bytes"),
    [(300, 64 * MIB), pytest.param(3000, 64 * MIB, marks=pytest.mark.soak)],
)
def test_whole_bucket_is_equal_and_the_second_pass_causes_no_get(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path, small_count: int, large_bytes: int
) -> None:
    source = tmp_path / "source"
    count = make_tree(source, small_count=small_count, large_bytes=large_bytes)
    bucket.upload(source)
    mount = mounting(bucket, via=proxy)
    with proxy.recording() as first:
        assert difference(source, mount.root) == ""
    total_bytes = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    assert total_bytes <= first.object_bytes <= total_bytes * 1.05
    assert find_count(mount.root) == count
    listed = {
        item["Key"]: item
        for page in bucket.account.client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name)
        for item in page["Contents"]
    }
    for key, item in listed.items():
        info = (mount.root / key).stat()
        assert (info.st_size, info.st_mtime) == (item["Size"], int(item["LastModified"].timestamp()))
    assert len(listed) == count
    drop_caches()
    with proxy.recording() as second:
        assert difference(source, mount.root) == ""
    assert second.gets == []
    mount.remount()
    with proxy.recording() as after_restart:
        assert difference(source, mount.root) == ""
    assert [seen for seen in after_restart.gets if seen.headers.get("range") != "bytes=0-0"] == []


@pytest.mark.parametrize("size_bytes", [64 * MIB, pytest.param(512 * MIB, marks=pytest.mark.soak)])
def test_eight_processes_that_read_one_cold_file_fetch_each_byte_once(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path, size_bytes: int
) -> None:
    rng = random.Random(8)
    body = b"".join(rng.randbytes(MIB) for _ in range(size_bytes // MIB))  # more than 256 MiB at once overflow
    (tmp_path / "truth").write_bytes(body)
    bucket.put("shared.bin", body)
    mount = mounting(bucket, via=proxy)
    with proxy.recording() as seen:
        readers = [subprocess.Popen(["cmp", tmp_path / "truth", mount.root / "shared.bin"]) for _ in range(8)]
        assert [reader.wait(300) for reader in readers] == [0] * 8
    assert size_bytes <= seen.object_bytes <= size_bytes * 1.05


def test_case_16_zero_and_one_byte_objects(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("zero", b"")
    bucket.put("one", b"x")
    mount = mounting(bucket)
    for _ in range(2):
        assert (mount.root / "zero").read_bytes() == b""
        assert (mount.root / "one").read_bytes() == b"x"
        drop_caches()
    with open(mount.root / "one", "rb", buffering=0) as file:
        assert [os.pread(file.fileno(), 10, offset) for offset in (0, 1, 2, 1 << 40)] == [b"x", b"", b"", b""]
    zero, one = (mount.root / "zero").stat(), (mount.root / "one").stat()
    assert (zero.st_size, zero.st_blocks, one.st_size, one.st_blocks) == (0, 0, 1, 1)


def test_case_21_random_small_reads_of_a_large_cold_file_do_not_download_it_many_times(
    bucket: Bucket, proxy: Proxy, mounting: Mounting
) -> None:
    size_bytes = 96 * MIB
    body = random.Random(21).randbytes(size_bytes)
    bucket.put("huge.bin", body)
    mount = mounting(bucket, via=proxy, hot_size="64MB")
    rng = random.Random(22)
    with proxy.recording() as seen, open(mount.root / "huge.bin", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(200):
            offset = rng.randrange(size_bytes - 4096)
            assert os.pread(file.fileno(), 4096, offset) == body[offset : offset + 4096]
    assert seen.object_bytes <= size_bytes


def test_case_21_a_small_read_of_a_large_file_stays_small(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    body = random.Random(23).randbytes(96 * MIB)
    bucket.put("huge.bin", body)
    mount = mounting(bucket, via=proxy)
    with proxy.recording() as seen, open(mount.root / "huge.bin", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(file.fileno(), 4096, 50 * MIB + 123) == body[50 * MIB + 123 : 50 * MIB + 123 + 4096]
    assert seen.object_bytes <= 9 * MIB
    assert mount.status()["tiers"]["hot"]["used_bytes"] <= 10 * MIB


def test_case_22_caching_changes_neither_times_nor_inode_numbers(bucket: Bucket, mounting: Mounting) -> None:
    keys = [f"dir/file-{number}" for number in range(10)]
    for key in keys:
        bucket.put(key, key.encode() * 1000)
    mount = mounting(bucket)

    def facts() -> list[tuple[int, ...]]:
        drop_caches()
        infos = [os.stat(mount.root / name) for name in [*keys, "dir", "."]]
        return [(info.st_ino, info.st_size, info.st_blocks, info.st_mtime_ns, info.st_ctime_ns, info.st_mode) for info in infos]

    cold = facts()
    assert len({number for number, *_ in cold}) == len(cold)
    for key in keys:
        assert (mount.root / key).read_bytes() == key.encode() * 1000
    assert facts() == cold
    mount.remount()
    assert facts() == cold


def test_seeks_holes_and_ends_read_as_in_a_plain_file(bucket: Bucket, mounting: Mounting) -> None:
    body = random.Random(5).randbytes(20 * MIB + 12345)
    bucket.put("file", body)
    mount = mounting(bucket)
    rng = random.Random(6)
    edges = [0, 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 16 * MIB - 4096, len(body) - 1, len(body), len(body) + 1]
    spans = [(offset, length) for offset in edges for length in (0, 1, 4096, 3 * MIB)]
    spans += [(rng.randrange(len(body)), rng.randrange(2 * MIB)) for _ in range(60)]
    rng.shuffle(spans)
    with open(mount.root / "file", "rb", buffering=0) as file:

        def same(span: tuple[int, int]) -> bool:
            offset, length = span
            found = b""
            while piece := os.pread(file.fileno(), length - len(found), offset + len(found)):
                found += piece
            return found == body[offset : offset + length]

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(same, spans))
        assert os.lseek(file.fileno(), 0, os.SEEK_END) == len(body)


def test_residency_is_told_by_attributes_and_by_where(bucket: Bucket, mounting: Mounting) -> None:
    etag = bucket.put("dir/file", b"content")
    mount = mounting(bucket)
    path = mount.root / "dir" / "file"
    assert os.getxattr(path, "user.tiercache.residency") == b"cold"
    assert os.getxattr(path, "user.tiercache.version") == f"{etag}:7".encode()
    assert set(os.listxattr(path)) == {"user.tiercache.residency", "user.tiercache.version"}
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(path, "user.tiercache.checksum")
    path.read_bytes()
    wait_until(lambda: os.getxattr(path, "user.tiercache.residency") == b"hot,cold", "a hot copy")
    assert os.getxattr(path, "user.tiercache.checksum").startswith(b"xxh3:")
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(path, "user.other")
    ran = mount.tiercache("where", path, "--json")
    (found,) = ran.json["files"]
    assert (found["residency"], found["size_bytes"], found["inode"]) == (["hot", "cold"], 7, path.stat().st_ino)


def test_statfs_shows_a_full_read_only_file_system(bucket: Bucket, mounting: Mounting) -> None:
    mount = mounting(bucket)
    info = os.statvfs(mount.root)
    assert (info.f_bfree, info.f_bavail, info.f_namemax) == (0, 0, 255)
    assert info.f_flag & os.ST_RDONLY
    done = subprocess.run(["df", "-P", mount.root], capture_output=True, text=True, timeout=30, check=True)
    assert bucket.source in done.stdout
