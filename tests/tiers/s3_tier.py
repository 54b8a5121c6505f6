"""Opening the S3 tier on a test server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tiercache.core.record import Listed, ObjectRef, object_id
from tiercache.tiers.cold.dial import Timeouts
from tiercache.tiers.cold.endpoint import Endpoint
from tiercache.tiers.cold.s3 import S3Cold
from tiercache.tiers.tier import MemorySink

BUCKET = "bucket"


@asynccontextmanager
async def open_s3(
    endpoint_url: str,
    *,
    bucket: str = BUCKET,
    prefix: str = "",
    region: str | None = None,
    anonymous: bool = False,
    requester_pays: bool = False,
    read_seconds: float = 15.0,
    threads: trio.CapacityLimiter | None = None,
) -> AsyncIterator[S3Cold]:
    """Credentials come from the environment; see `S3Account.in_environment`."""
    endpoint = Endpoint(endpoint_url, region=region, anonymous=anonymous, requester_pays=requester_pays)
    limiter = threads if threads is not None else trio.CapacityLimiter(4)
    tier = S3Cold(bucket, prefix, endpoint, dataset="data", timeouts=Timeouts(2.0, read_seconds), threads=limiter)
    try:
        yield tier
    finally:
        await tier.aclose()


def ref_of(tier: S3Cold, listed: Listed) -> ObjectRef:
    oid = object_id(tier.source_id, listed.key, listed.version)
    return ObjectRef(tier.dataset, listed.key, listed.version, listed.size_bytes, listed.mtime_seconds, oid)


async def read(tier: S3Cold, ref: ObjectRef, offset: int = 0, length: int | None = None) -> bytes:
    length = ref.size_bytes - offset if length is None else length
    sink = MemorySink(length)
    await tier.read(ref, offset, length, sink)
    assert sink.received_bytes == length
    return bytes(sink.view)
