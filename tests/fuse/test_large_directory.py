"""CASES line 20: directories of 20,000 and 100,000 entries: first entries at once, a flat daemon, no needless request."""

from __future__ import annotations

import os
import subprocess
import threading
import time

from tests.fuse.mount import Mount, Mounting, drop_caches
from tests.servers.scripted import Answer, Asked, running_scripted
from tests.servers.synthetic import SyntheticBucket

PAGE_COUNT = 1000
RESIDENT_BYTES = 250 << 20
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def mounted(mounting: Mounting, endpoint_url: str) -> Mount:
    return mounting("s3://bucket", extra=KEYS, options=["--endpoint-url", endpoint_url])


def test_opening_a_file_in_a_directory_that_was_never_listed_costs_three_requests(mounting: Mounting) -> None:
    script = SyntheticBucket([f"big/sample-{number:05d}" for number in range(20_000)])
    with running_scripted(script) as server:
        mount = mounted(mounting, server.endpoint_url)
        before_count = len(server.asked)
        assert (mount.root / "big/sample-12345").read_bytes() == script.body("big/sample-12345")
        assert len(server.asked) - before_count <= 3
        mount.remount()
        before_count = len(server.asked)
        assert (mount.root / "big/sample-12345").read_bytes() == script.body("big/sample-12345")
        assert len(server.asked) - before_count == 0


def test_case_20_a_hundred_thousand_entries_stream_and_are_listed_once(mounting: Mounting) -> None:
    count = 100_000
    script = SyntheticBucket([f"big/sample-{number:06d}" for number in range(count)], size_bytes=10)
    pages_served, released = 0, threading.Event()

    def gated(asked: Asked) -> Answer:
        """From the third page on the store waits until the first names have been seen."""
        nonlocal pages_served
        if "list-type" in asked.target and "prefix=big%2F" in asked.target:
            pages_served += 1
            if pages_served > 2:
                released.wait(30)
        return script(asked)

    with running_scripted(gated) as server:
        mount = mounted(mounting, server.endpoint_url)
        listing = subprocess.Popen(["ls", "-f", str(mount.root / "big")], stdout=subprocess.PIPE, text=True)
        assert listing.stdout is not None
        try:
            names = [name for name in (listing.stdout.readline().strip() for _ in range(500)) if not name.startswith(".")]
            assert set(names) <= {f"sample-{number:06d}" for number in range(3000)}
            assert len(names) >= 498
            assert pages_served <= 4, "the first names came only after the listing was far on"
            released.set()
            names += [name for name in listing.stdout.read().split("\n") if name and not name.startswith(".")]
        finally:
            released.set()
            listing.kill()
            listing.wait()
            listing.stdout.close()
        assert len(set(names)) == len(names) == count
        assert pages_served == count // PAGE_COUNT
        asked_count = len(server.asked)
        drop_caches()
        began = time.monotonic()
        assert len(os.listdir(mount.root / "big")) == count
        second_seconds = time.monotonic() - began
        assert os.stat(mount.root / "big/sample-099999").st_size == 10
        assert len(server.asked) == asked_count
        assert mount.resident_bytes() < RESIDENT_BYTES
        with os.scandir(mount.root / "big") as entries:
            assert sum(entry.stat().st_size for entry in entries) == count * 10
        assert len(server.asked) == asked_count
        assert mount.resident_bytes() < RESIDENT_BYTES
        print(f"second listing {second_seconds:.2f} s, resident {mount.resident_bytes() >> 20} MiB")  # noqa: T201
