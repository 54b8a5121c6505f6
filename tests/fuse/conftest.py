"""What real mounts need: an S3 server for all of them, buckets and proxies for each, and an end to every mount."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fuse.bucket import Bucket, new_bucket, remove_bucket
from tests.fuse.mount import Mount, Mounting
from tests.servers.moto import Moto, running_moto
from tests.servers.proxy import Proxy, running_proxy
from tests.servers.rgw import Rgw, running_rgw
from tests.servers.weed import Weed, running_weed


@pytest.fixture(scope="session")
def can_mount() -> None:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("makes real mounts: needs root and /dev/fuse")


@pytest.fixture(scope="session")
def weed(can_mount: None) -> Iterator[Weed]:
    with running_weed() as server:
        yield server


@pytest.fixture(scope="session")
def moto(can_mount: None) -> Iterator[Moto]:
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def rgw(can_mount: None) -> Iterator[Rgw]:
    with running_rgw() as server:
        yield server


@pytest.fixture
def bucket(weed: Weed) -> Iterator[Bucket]:
    made = new_bucket(weed)
    yield made
    remove_bucket(made)


@pytest.fixture
def proxy(weed: Weed) -> Iterator[Proxy]:
    with running_proxy(weed.endpoint_url) as between:
        yield between


@pytest.fixture
def mounting(can_mount: None, tmp_path: Path) -> Iterator[Mounting]:
    """`mounting(source or bucket, via=proxy, ...)` is a Mount that is started, and ended with the test."""
    with ExitStack() as stack:
        mounts: list[Mount] = []

        def start(source: str | Bucket, *, via: Proxy | None = None, started: bool = True, **options: Any) -> Mount:
            if isinstance(source, Bucket):
                options = _reaching(source, source.account.endpoint_url if via is None else via.endpoint_url, options)
                source = source.source
            mount = Mount(source, tmp_path / f"m{len(mounts)}", **options)
            mounts.append(mount)
            stack.callback(mount.close)
            if started:
                mount.start()
            return mount

        yield start
        for mount in mounts:
            print(f"--- log of {mount.point}\n{mount.log_text()[-4000:]}", file=sys.stderr)  # noqa: T201 - shown when a test fails


def _reaching(bucket: Bucket, endpoint_url: str, options: dict[str, Any]) -> dict[str, Any]:
    extra = {**bucket.account.environment, **options.pop("extra", {})}
    if "settings" in options:
        settings = {name: dict(table) for name, table in options.pop("settings").items()}
        settings["cold"] = {"endpoint_url": endpoint_url, **settings.get("cold", {})}
        return {**options, "extra": extra, "settings": settings}
    return {**options, "extra": extra, "options": ["--endpoint-url", endpoint_url, *options.pop("options", ())]}
