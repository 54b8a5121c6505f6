"""Many processes open, map, read and close the same files while these are filled, evicted, overwritten and filled again."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.crowd import Crowd, reading
from tests.fuse.mount import Mount, Mounting
from tests.fuse.stamped import content
from tests.fuse.test_kills import await_all_closed
from tests.servers.process import wait_until

MIB = 1 << 20
READERS = 32
CHUNKS = {"chunk_size": "1MiB"}
LARGE_BYTES, SMALL_BYTES = 3 * MIB + 4096, 50_000


def sizes() -> dict[str, int]:
    large = {f"{kind}{number}-large": LARGE_BYTES for kind in "sv" for number in range(6)}
    return large | {f"{kind}{number}": SMALL_BYTES for kind in "sv" for number in range(30)}


def overwrite(bucket: Bucket, ended: threading.Event) -> None:
    """One key of a changing kind after the other gets its next version."""
    rng = random.Random(4)
    versions = {key: 0 for key in sizes() if key.startswith("v")}
    while not ended.wait(0.2):
        key = rng.choice(list(versions))
        versions[key] += 1
        bucket.put(key, content(key, versions[key], sizes()[key]))


@pytest.mark.parametrize("read_path", ["auto", "plain"])
@pytest.mark.parametrize("seconds", [8.0, pytest.param(300.0, marks=pytest.mark.soak)])
def test_no_combination_of_opens_is_an_error(
    bucket: Bucket, mounting: Mounting, tmp_path: Path, seconds: float, read_path: str
) -> None:
    for key, size in sizes().items():
        bucket.put(key, content(key, 0, size))
    settings = {"hot": CHUNKS, "mount": {"metadata_ttl": "1s", "read_path": read_path}}
    mount: Mount = mounting(bucket, settings=settings, hot_size="20MB")
    ended = threading.Event()
    writer = threading.Thread(target=overwrite, args=(bucket, ended))
    writer.start()
    try:
        with reading(mount.root, tmp_path, ["mixed"] * READERS) as crowd:
            until = time.monotonic() + seconds
            wait_until(lambda: time.monotonic() > until, "the end of the time", seconds + 10)
            await_everyone(crowd)
            wait_until(lambda: mount.metrics()["tiercache_evictions_total"] > 10, "evictions", 60.0)
    finally:
        ended.set()
        writer.join()
    assert crowd.errors == []
    assert crowd.stale_count <= crowd.rounds_count / 20
    await_all_closed(mount)


def await_everyone(crowd: Crowd) -> None:
    wait_until(lambda: min(crowd.rounds()) > 3, "rounds of everyone", 60.0)
