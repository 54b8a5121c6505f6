"""kill -9 at random moments of fills: no wrong byte afterwards, and what was committed is not fetched again."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting, difference
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy, Seen

MIB = 1 << 20
SETTINGS = {"hot": {"chunk_size": "1MiB"}}


def fill(directory: Path) -> int:
    directory.mkdir()
    rng = random.Random(9)
    sizes = [3 * MIB + 17, 100_000, 1, 0, 4 * MIB] * 4 + [16 * MIB]
    for number, size in enumerate(sizes):
        (directory / f"file-{number:03d}").write_bytes(rng.randbytes(size))
    return sum(sizes)


def read_until_it_dies(mount: Mount, names: list[str]) -> None:
    for name in names:
        try:
            (mount.root / name).read_bytes()
        except OSError:
            return


def committed_bytes(mount: Mount, names: list[str]) -> int:
    ran = mount.tiercache("where", "--json", *(mount.root / name for name in names))
    assert ran.code == 0, ran.err
    return sum(min(file["hot_bytes"], file["size_bytes"]) for file in ran.json["files"])


def whole(mount: Mount, names: list[str]) -> set[str]:
    """Files of which all chunks are committed."""
    return {name for name in names if os.getxattr(mount.root / name, "user.tiercache.residency") == b"hot,cold"}


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_case_08_kills_during_fills_cost_neither_right_bytes_nor_committed_chunks(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path, kills: int
) -> None:
    source = tmp_path / "source"
    total_bytes = fill(source)
    bucket.upload(source)
    names = sorted(path.name for path in source.iterdir())
    rng = random.Random(kills)
    mount = mounting(bucket, via=proxy, settings=SETTINGS, started=False)

    def slow_down(seen: Seen) -> None:
        time.sleep(0.0 if seen.is_list else 0.05)  # the store's own latency: without it the first round would fetch everything

    proxy.before = slow_down
    hot: set[str] = set()
    for _ in range(kills):
        mount.start()
        assert hot <= whole(mount, names), "a crash lost committed chunks"
        reader = threading.Thread(target=read_until_it_dies, args=(mount, rng.sample(names, len(names))))
        reader.start()
        time.sleep(rng.uniform(0.02, 0.6))  # the random moment that is tested
        hot = whole(mount, names)
        mount.kill()
        reader.join()
    mount.start()
    present_bytes = committed_bytes(mount, names)
    assert hot <= whole(mount, names)
    with proxy.recording() as seen:
        assert difference(source, mount.root) == ""
    assert seen.object_bytes <= total_bytes - present_bytes + MIB // 2, "committed chunks were fetched again"


def test_a_reader_that_is_killed_leaves_the_fill_to_the_others(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path
) -> None:
    body = random.Random(1).randbytes(24 * MIB)
    bucket.put("file", body)
    mount = mounting(bucket, via=proxy)
    with proxy.recording() as seen:
        killed = subprocess.Popen(["cat", mount.root / "file"], stdout=subprocess.PIPE)
        assert killed.stdout is not None
        killed.stdout.read(MIB)
        killed.kill()
        killed.wait(30)
        killed.stdout.close()
        assert (mount.root / "file").read_bytes() == body
    assert seen.object_bytes <= 1.05 * len(body)


@pytest.mark.parametrize("files_count", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_case_08_a_large_leftover_cache_neither_delays_the_mount_nor_is_thrown_away(
    mounting: Mounting, tmp_path: Path, files_count: int
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(files_count):
        (source / f"{number:05d}").write_bytes(number.to_bytes(4, "big") * 300)
    mount = mounting(f"file://{source}")
    assert difference(source, mount.root) == ""
    paths = list(mount.root.iterdir())
    wait_until(lambda: all(os.getxattr(path, "user.tiercache.residency") == b"hot,cold" for path in paths), "all commits")
    mount.kill()
    ran = mount.mount()
    assert ran.code == 0, ran.err
    assert ran.seconds < 5.0
    mount.pid = ran.json["status"]["pid"]
    assert difference(source, mount.root) == ""
    metrics = mount.metrics()
    assert metrics.get('tiercache_fills_total{tier="cold"}', 0.0) == 0.0
