"""The conformance suite on Ceph RGW, a second real S3 server, whose key names are exact (`make test-rgw`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import rgw
from tests.servers.s3 import S3Account
from tests.tiers.conformance import CHECKS, Check
from tests.tiers.test_conformance import BUCKET, S3Store

pytestmark = pytest.mark.rgw


@pytest.fixture(scope="module")
def server() -> Iterator[S3Account]:
    if not rgw.is_installed():
        pytest.skip("Ceph RGW is not installed (Debian: radosgw ceph-mon ceph-osd ceph-common)")
    with rgw.running_rgw() as running:
        running.make_bucket(BUCKET)
        with running.in_environment():
            yield running


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_rgw_conforms(check: Check, server: S3Account) -> None:
    store = S3Store(server, f"{check.__name__}/", is_exact=True)
    try:
        await check(store)
    finally:
        await store.cold.aclose()
