"""Pins on a real mount: durable, admitted with numbers, fetched in the background, and out of reach of reclaim."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy, Seen

MIB = 1 << 20
SMALL = {"hot": {"chunk_size": "1MiB"}}


def residency(path: Path) -> bytes:
    return os.getxattr(path, "user.tiercache.residency")


def fill(bucket: Bucket) -> dict[str, bytes]:
    bodies = {f"{place}/{number}": random.Random(number).randbytes(2 * MIB) for place in ("kept", "other") for number in range(4)}
    for key, body in bodies.items():
        bucket.put(key, body)
    return bodies


def read_others(mount: Mount, bucket: Bucket) -> None:
    """More than fits, and older than fresh: what may go has gone afterwards."""
    for number in range(4):
        (mount.root / f"other/{number}").read_bytes()
    bucket.put("large", random.Random(9).randbytes(30 * MIB))
    (mount.root / "large").read_bytes()


@pytest.mark.parametrize("what", ["kept", "kept/1"], ids=["prefix", "file"])
def test_what_is_pinned_is_hot_and_stays(bucket: Bucket, proxy: Proxy, mounting: Mounting, what: str) -> None:
    bodies = fill(bucket)
    mount = mounting(bucket, via=proxy, hot_size="20MB", settings=SMALL)
    ran = mount.tiercache("pin", mount.root / what, "--wait", "--reason", "epoch", "--json")
    assert ran.code == 0, ran.err
    answer = ran.json
    count = 4 if what == "kept" else 1
    assert (answer["admitted"], answer["objects_count"], answer["wanted_bytes"]) == (True, count, count * 2 * MIB)
    assert (answer["progress"]["hot_objects_count"], answer["progress"]["done"]) == (count, True)
    pinned = [key for key in bodies if key.startswith(what)]
    assert all(residency(mount.root / key) == b"hot,cold" for key in pinned)
    read_others(mount, bucket)
    assert all(residency(mount.root / key) == b"hot,cold" for key in pinned)
    with proxy.recording() as seen:
        for key in pinned:
            assert (mount.root / key).read_bytes() == bodies[key]
    assert seen.gets == []
    (shown,) = mount.tiercache("pins", "--json").json["pins"]
    assert (shown["path"].rstrip("/"), shown["reason"], shown["exact"]) == (f"data/{what}", "epoch", what != "kept")
    (found,) = mount.tiercache("where", "--json", mount.root / pinned[0]).json["files"]
    assert found["pin"]["reason"] == "epoch"


def test_a_pin_outlives_the_daemon_and_is_fetched_by_its_successor(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    bodies = fill(bucket)
    mount = mounting(bucket, via=proxy)
    released = threading.Event()

    def hold(seen: Seen) -> None:
        if not seen.is_list:
            released.wait(60)

    proxy.before = hold  # the fetch is under way when the daemon is killed
    ran = mount.tiercache("pin", mount.root / "kept")
    assert ran.code == 0, ran.err
    mount.kill()
    released.set()
    mount.start()
    assert [pin["path"].rstrip("/") for pin in mount.tiercache("pins", "--json").json["pins"]] == [f"{bucket.name}/kept"]
    keys = [key for key in bodies if key.startswith("kept/")]
    wait_until(lambda: all(residency(mount.root / key) == b"hot,cold" for key in keys), "the fetch of what is pinned", 20)


def test_what_does_not_fit_is_refused_with_the_numbers(bucket: Bucket, mounting: Mounting) -> None:
    fill(bucket)
    mount = mounting(bucket, hot_size="10MB", settings=SMALL)
    dry = mount.tiercache("pin", "--dry-run", mount.root / "kept", "--json")
    assert (dry.code, dry.json["admitted"], dry.json["pins"]) == (0, True, [])
    ran = mount.tiercache("pin", mount.root, "--json")
    assert (ran.code, ran.json["admitted"]) == (1, False)
    assert (ran.json["wanted_bytes"], ran.json["pinnable_bytes"]) == (16 * MIB, 9_000_000)
    assert ran.err.count("\n") == 1
    assert mount.tiercache("pins", "--json").json["pins"] == []


def test_unpinned_files_may_go_and_a_ttl_ends_by_itself(bucket: Bucket, mounting: Mounting) -> None:
    fill(bucket)
    mount = mounting(bucket, hot_size="20MB", settings=SMALL)
    assert mount.tiercache("pin", mount.root / "kept", "--wait").code == 0
    ran = mount.tiercache("unpin", mount.root / "kept", "--json")
    assert (ran.code, len(ran.json["removed"])) == (0, 1)
    again = mount.tiercache("unpin", mount.root / "kept", "--json")
    assert (again.code, len(again.json["not_pinned"])) == (0, 1)
    assert mount.tiercache("pin", mount.root / "kept", "--ttl", "1s").code == 0
    wait_until(lambda: mount.tiercache("pins", "--json").json["pins"] == [], "the end of the pin")


def test_pinning_what_does_not_exist_is_an_error(bucket: Bucket, mounting: Mounting) -> None:
    fill(bucket)
    mount = mounting(bucket)
    ran = mount.tiercache("pin", mount.root / "nowhere")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "nowhere" in ran.err
