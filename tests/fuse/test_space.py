"""The cache keeps its limit, and its disk its free space; a full cache and a full disk are never an error to a reader."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting, difference
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy
from tests.tiers.disks import ext4, fill_up

MIB = 1 << 20
CHUNK_BYTES = MIB
READERS = 4
SETTINGS = {"hot": {"chunk_size": "1MiB", "min_free": "1MiB"}, "policy": {"read_ahead": "16MiB"}}


def a_dataset(directory: Path, total_bytes: int, *sizes_bytes: int) -> list[Path]:
    """Files of these sizes in turn, as many as make up the total."""
    directory.mkdir()
    rng = random.Random(total_bytes)
    paths: list[Path] = []
    left_bytes = total_bytes
    while left_bytes > 0:
        path, size_bytes = directory / f"{len(paths):04d}", sizes_bytes[len(paths) % len(sizes_bytes)]
        path.write_bytes(rng.randbytes(size_bytes))
        paths.append(path)
        left_bytes -= size_bytes
    return paths


@pytest.fixture
def disk(can_mount: None, tmp_path: Path) -> Iterator[Path]:
    """A file system for one cache alone: what it uses is what the cache uses, names, index and unlinked files included."""
    with ext4(tmp_path / "image", tmp_path / "disk", 1 << 30) as point:
        yield point


def used_bytes(disk: Path) -> int:
    info = os.statvfs(disk)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def read_at_random(mount: Mount, paths: list[Path], seconds: float) -> list[str]:
    """By `READERS` threads; what went wrong."""
    until = time.monotonic() + seconds
    wrong: list[str] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until and not wrong:
            path = rng.choice(paths)
            size = path.stat().st_size
            offset = 0 if rng.random() < 0.5 else rng.randrange(size + 1)
            length = size if rng.random() < 0.3 else rng.randrange(1, 2 * MIB)
            try:
                with open(mount.root / path.name, "rb", buffering=0) as mounted, open(path, "rb", buffering=0) as truth:
                    while length > 0 and (found := os.pread(mounted.fileno(), min(length, MIB), offset)):
                        if found != os.pread(truth.fileno(), len(found), offset):
                            wrong.append(f"other bytes in {path.name} at {offset}")
                        offset, length = offset + len(found), length - len(found)
            except OSError as error:
                wrong.append(f"{path.name} at {offset}: {error}")

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(READERS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return wrong


@pytest.mark.parametrize(
    ("hot_mb", "total_mib", "seconds"), [(40, 160, 5.0), pytest.param(200, 1024, 60.0, marks=pytest.mark.soak)]
)
def test_case_06_the_cache_never_exceeds_its_limit_while_many_read(
    mounting: Mounting, disk: Path, tmp_path: Path, hot_mb: int, total_mib: int, seconds: float
) -> None:
    paths = a_dataset(tmp_path / "source", total_mib * MIB, 4 * MIB, 100_000, 100_000, 300_000, 1, 0)
    before_bytes = used_bytes(disk)
    mount = mounting(f"file://{tmp_path}/source", hot=disk / "hot", hot_size=f"{hot_mb}MB", settings=SETTINGS)
    highest, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.01):
            highest = max(highest, used_bytes(disk) - before_bytes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        wrong = read_at_random(mount, paths, seconds)
    finally:
        stop.set()
        watcher.join()
    assert wrong == []
    assert highest <= hot_mb * 1_000_000 + READERS * CHUNK_BYTES
    assert highest >= hot_mb * 1_000_000 // 2, "the cache is not used"
    cold = [path for path in paths if not os.getxattr(mount.root / path.name, "user.tiercache.residency").startswith(b"hot,")]
    deadline = time.monotonic() + 30
    while mount.metrics()["tiercache_evictions_total"] == 0:  # what was opened within two seconds stays: leave the hot ones alone
        assert time.monotonic() < deadline, "nothing is ever evicted"
        for path in cold:
            with open(mount.root / path.name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                assert file.read() == path.read_bytes()
    metrics = mount.metrics()
    assert metrics[f'tiercache_hot_used_bytes{{directory="{disk}/hot"}}'] <= hot_mb * 1_000_000 + CHUNK_BYTES


def test_case_07_a_disk_that_others_fill_up_is_no_error(mounting: Mounting, tmp_path: Path) -> None:
    """Neither chunks nor the index have room: all is served past the cache, names that were never seen before too."""
    paths = a_dataset(tmp_path / "source", 60 * MIB, 5 * MIB)
    directories = [tmp_path / "source" / f"dir-{number}" for number in range(10)]
    for directory in directories:
        a_dataset(directory, 50_000, 1000)
    with ext4(tmp_path / "image", tmp_path / "disk", 80 * MIB) as disk:
        mount = mounting(f"file://{tmp_path}/source", hot=disk / "hot", hot_size="50MB", settings=SETTINGS)
        try:
            for path in paths[:4]:
                assert (mount.root / path.name).read_bytes() == path.read_bytes()
            fill_up(disk)
            assert read_at_random(mount, paths, 1.0) == []
            for directory in directories:
                assert difference(directory, mount.root / directory.name) == ""
            (disk / "ballast").unlink()
            assert difference(tmp_path / "source", mount.root) == ""
            mount.umount()
        finally:
            mount.close()


def test_case_07_readers_of_more_than_fits_do_not_evict_each_others_fresh_chunks_for_ever(
    bucket: Bucket, proxy: Proxy, mounting: Mounting
) -> None:
    """Four sequential readers, each of a file larger than the cache: every byte is fetched about once."""
    bodies = {f"file-{number}": random.Random(number).randbytes(24 * MIB) for number in range(4)}
    for key, body in bodies.items():
        bucket.put(key, body)
    mount = mounting(bucket, via=proxy, hot_size="20MB", settings=SETTINGS)
    wrong: list[str] = []

    def read(key: str, body: bytes) -> None:
        with open(mount.root / key, "rb", buffering=0) as file:
            offset = 0
            while found := file.read(256 << 10):
                if found != body[offset : offset + len(found)]:
                    wrong.append(f"{key} at {offset}")
                offset += len(found)
        if offset != len(body):
            wrong.append(f"{key} ends at {offset}")

    with proxy.recording() as seen:
        readers = [threading.Thread(target=read, args=pair) for pair in bodies.items()]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert seen.object_bytes <= 1.2 * sum(map(len, bodies.values()))


def test_case_07_an_object_larger_than_the_cache_reads_whole_and_does_not_evict_itself(
    mounting: Mounting, tmp_path: Path
) -> None:
    (path,) = a_dataset(tmp_path / "source", 64 * MIB, 64 * MIB)
    mount = mounting(f"file://{tmp_path}/source", hot_size="16MB", settings=SETTINGS)
    for _ in range(2):
        assert (mount.root / path.name).read_bytes() == path.read_bytes()
        with open(mount.root / path.name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert mount.status()["tiers"]["hot"]["used_bytes"] <= 16_000_000
    hits = mount.metrics()['tiercache_read_bytes_total{dataset="data",tier="hot"}']
    assert hits >= 4 * MIB, "the second pass found nothing of the first"


def test_case_06_a_cached_file_that_nobody_uses_is_not_kept_open(mounting: Mounting, tmp_path: Path) -> None:
    """An evicted file that is still open keeps its blocks, and no count of the cache's directory shows them."""
    paths = a_dataset(tmp_path / "source", 12 * MIB, 200_000, 3 * MIB)
    mount = mounting(f"file://{tmp_path}/source", settings=SETTINGS)
    for path in paths:
        assert (mount.root / path.name).read_bytes() == path.read_bytes()

    def open_count() -> int:
        count = 0
        for link in Path(f"/proc/{mount.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                count += "/hot/objects/" in os.readlink(link)
        return count

    wait_until(lambda: open_count() == 0, "the last descriptor's end", 5.0)
