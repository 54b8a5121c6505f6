"""What falls out of the hot tier is read again from the targets, and the store is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mounting
from tests.fuse.warm import MIB, Targets, a_mixed_dataset, read_all
from tests.servers.proxy import Proxy


@pytest.mark.parametrize(("data_count", "parity_count", "hot_mib"), [(4, 2, 60), (8, 3, 40)])
def test_five_times_the_hot_tier_is_read_twice_and_the_store_only_once(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path, data_count: int, parity_count: int, hot_mib: int
) -> None:
    targets = Targets(tmp_path / "warm", data_count, parity_count)
    source = tmp_path / "source"
    paths = a_mixed_dataset(source, 5 * hot_mib * MIB)
    bucket.upload(source)
    mount = mounting(bucket, via=proxy, hot_size=f"{hot_mib}MiB", options=targets.options)
    with proxy.recording() as first:
        read_all(mount, source, paths, 1)
    assert first.gets, "nothing came from the store"
    with proxy.recording() as second:
        read_all(mount, source, paths, 2)
    assert [seen.path for seen in second.gets] == []
