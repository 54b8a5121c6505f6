"""A replica under a real mount: used where it proves equal, passed over where it does not, and never the end of the daemon."""

from __future__ import annotations

import os
import random
from itertools import count
from pathlib import Path

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting
from tests.servers.process import wait_until

PAGE_BYTES = 4096
LARGE_BYTES = 12 << 20
"""Above what a replica hashes before the first read: such a file is verified in the background."""


def replica_bytes(mount: Mount) -> float:
    return mount.metrics().get('tiercache_read_bytes_total{dataset="data",tier="replica"}', 0.0)


def test_a_missing_replica_and_an_empty_source_are_told_of(mounting: Mounting, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    replica = tmp_path / "replica"
    mount = mounting(f"file://{source}", options=["--replica", str(replica)], started=False)
    began = mount.start()
    wanted = [
        f"source file://{source} held nothing when it was mounted: check the prefix",
        f"replica {replica} does not exist: all is read from the source until something is there",
    ]
    assert began["notices"] == wanted
    status = mount.status()
    assert status["notices"] == wanted
    assert status["tiers"]["warm"]["state"] == "down"
    assert "does not exist" in status["tiers"]["warm"]["detail"]
    assert all(event in mount.log_text() for event in ("source_is_empty", "replica_is_missing"))
    shown = mount.tiercache("mount", mount.source, mount.point).out
    assert all(f"notice: {notice}" in shown for notice in wanted)


def test_a_large_file_is_served_by_the_replica_once_it_is_verified(bucket: Bucket, mounting: Mounting, tmp_path: Path) -> None:
    body = random.Random(1).randbytes(LARGE_BYTES)
    bucket.put("large", body)
    replica = tmp_path / "replica"
    replica.mkdir()
    (replica / "large").write_bytes(body)
    mount = mounting(bucket, settings={"dataset": {"replica": str(replica)}, "policy": {"whole_file": "1MB"}})
    pages = count(1, 5)

    with (mount.root / "large").open("rb", buffering=0) as file:

        def comes_from_the_replica() -> bool:
            begin = next(pages) * PAGE_BYTES
            assert os.pread(file.fileno(), PAGE_BYTES, begin) == body[begin : begin + PAGE_BYTES]
            return replica_bytes(mount) > 0

        wait_until(comes_from_the_replica, "a read from the replica")


def test_files_that_differ_from_the_store_are_never_served(bucket: Bucket, mounting: Mounting, tmp_path: Path) -> None:
    rng = random.Random(2)
    replica = tmp_path / "replica"
    replica.mkdir()
    bodies = {name: rng.randbytes(size) for name, size in {"small": 50_000, "large": LARGE_BYTES, "shorter": 7}.items()}
    for name, body in bodies.items():
        bucket.put(name, body)
        (replica / name).write_bytes(rng.randbytes(len(body) - (name == "shorter")))
    mount = mounting(bucket, settings={"dataset": {"replica": str(replica)}})
    for _ in range(2):
        for name, body in bodies.items():
            assert (mount.root / name).read_bytes() == body
    assert replica_bytes(mount) == 0
    ignored = {name for name, value in mount.metrics().items() if name.startswith("tiercache_replica_ignored_total") and value}
    assert {f'tiercache_replica_ignored_total{{reason="{reason}"}}' for reason in ("differs", "verifying", "size")} <= ignored
