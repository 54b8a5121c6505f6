"""What a GET costs the client: boto3, http.client and urllib3 with botocore's signer, and both of tiercache's own ways.

    python -m bench.get_cost [--rounds 3] [--large-mib 512] [--small-count 2000]

Client CPU only (the server is another process, on the same cores if there are few); nothing is written to a disk.
All ask for all but the last byte of the small objects, because tiercache would check the MD5 of whole ones (0.1 ms
each). The candidates take turns within a round, and each figure is the median of the rounds. Its outcome stands in
`docs/architecture.md`.
"""

from __future__ import annotations

import argparse
import http.client
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any, Literal

import boto3
import botocore.config
import trio
import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.servers.s3 import S3Account
from tests.servers.weed import running_weed
from tiercache.core.record import ObjectRef, object_id
from tiercache.tiers.cold import s3
from tiercache.tiers.cold.endpoint import Endpoint
from tiercache.tiers.cold.s3 import S3Cold
from tiercache.tiers.tier import MemorySink

BUCKET = "bench"
RANGE_BYTES = 8 << 20
SMALL_BYTES = 100 << 10
LARGE_THREADS, SMALL_THREADS = 8, 16

Job = tuple[str, int, int]  # key, offset, length
Run = Callable[[list[Job], int], None]


def _in_threads(get: Callable[[Job], None], jobs: list[Job], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(get, jobs):
            pass


def boto3_client(server: S3Account) -> Run:
    client = boto3.client("s3", endpoint_url=server.endpoint_url, config=botocore.config.Config(max_pool_connections=32))

    def get(job: Job) -> None:
        key, offset, length = job
        body = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={offset}-{offset + length - 1}")["Body"]
        assert sum(len(piece) for piece in body.iter_chunks(1 << 20)) == length

    return lambda jobs, threads: _in_threads(get, jobs, threads)


def _signed_headers(server: S3Account, key: str, offset: int, length: int) -> dict[str, str]:
    request = AWSRequest(method="GET", url=f"{server.endpoint_url}/{BUCKET}/{key}")
    S3SigV4Auth(Credentials(server.access_key, server.secret_key), "s3", "us-east-1").add_auth(request)
    return {**dict(request.headers.items()), "Range": f"bytes={offset}-{offset + length - 1}"}


def _drain(response: Any, memory: memoryview, length: int) -> None:
    done = 0
    while done < length:
        done += response.readinto(memory[done:length])


def standard_library(server: S3Account) -> Run:
    kept = local()

    def get(job: Job) -> None:
        key, offset, length = job
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(server.endpoint_url.removeprefix("http://"))
            kept.memory = memoryview(bytearray(RANGE_BYTES))
        kept.connection.request("GET", f"/{BUCKET}/{key}", headers=_signed_headers(server, key, offset, length))
        _drain(kept.connection.getresponse(), kept.memory, length)

    return lambda jobs, threads: _in_threads(get, jobs, threads)


def urllib3_pool(server: S3Account) -> Run:
    pool = urllib3.HTTPConnectionPool(server.endpoint_url.removeprefix("http://").split(":")[0],
                                      int(server.endpoint_url.rsplit(":", 1)[1]), maxsize=32)  # fmt: skip
    kept = local()

    def get(job: Job) -> None:
        key, offset, length = job
        if not hasattr(kept, "memory"):
            kept.memory = memoryview(bytearray(RANGE_BYTES))
        headers = _signed_headers(server, key, offset, length)
        response = pool.urlopen("GET", f"/{BUCKET}/{key}", headers=headers, preload_content=False)
        _drain(response, kept.memory, length)
        response.release_conn()

    return lambda jobs, threads: _in_threads(get, jobs, threads)


class _Drain:
    """A sink that receives into the same memory again and again."""

    def __init__(self, memory: memoryview) -> None:
        self.received_bytes = 0
        self._memory = memory

    def buffer(self, wanted_bytes: int) -> memoryview:
        return self._memory[:wanted_bytes]

    def advance(self, count: int) -> None:
        self.received_bytes += count

    def place(self, length: int) -> memoryview:
        return self._memory[:length]

    def landed(self, count: int, digest: int | None = None) -> None:
        self.received_bytes += count


def tiercache_path(server: S3Account, fetching: Literal["native", "python"]) -> Run:
    endpoint = Endpoint(server.endpoint_url)

    def run(jobs: list[Job], threads: int) -> None:
        s3.FETCHING = fetching
        trio.run(_read_all, endpoint, list(jobs), threads)

    return run


async def _read_all(endpoint: Endpoint, jobs: list[Job], threads: int) -> None:
    tier = S3Cold(BUCKET, "", endpoint, dataset="bench", threads=trio.CapacityLimiter(threads))
    known = {key: await tier.head(key) for key in ("large", "small/0")}

    async def work() -> None:
        memory = memoryview(bytearray(RANGE_BYTES))
        while jobs:
            key, offset, length = jobs.pop()
            listed = known["large" if key == "large" else "small/0"]  # all small objects are equal
            oid = object_id(tier.source_id, key, listed.version)
            ref = ObjectRef("bench", key, listed.version, listed.size_bytes, listed.mtime_seconds, oid)
            await tier.read(ref, offset, length, _Drain(memory))

    async with trio.open_nursery() as nursery:
        for _ in range(threads):
            nursery.start_soon(work)
    await tier.aclose()


def _first_byte_ms(server: S3Account) -> float:
    """4 KiB in the middle of the large object, one at a time, median of 30."""

    async def measure() -> list[float]:
        tier = S3Cold(BUCKET, "", Endpoint(server.endpoint_url), dataset="bench", threads=trio.CapacityLimiter(1))
        listed = await tier.head("large")
        oid = object_id(tier.source_id, "large", listed.version)
        ref = ObjectRef("bench", "large", listed.version, listed.size_bytes, listed.mtime_seconds, oid)
        took = []
        for step in range(30):
            start = time.perf_counter()
            await tier.read(ref, listed.size_bytes // 2 + step * 4096, 4096, MemorySink(4096))
            took.append((time.perf_counter() - start) * 1e3)
        await tier.aclose()
        return took

    return statistics.median(trio.run(measure))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large-mib", type=int, default=512)
    options.add_argument("--small-count", type=int, default=2000)
    chosen = options.parse_args()
    large_bytes = chosen.large_mib << 20
    with running_weed() as server:
        os.environ.update(server.environment)
        server.make_bucket(BUCKET)
        server.put(BUCKET, "large", os.urandom(1 << 20) * chosen.large_mib)
        small = os.urandom(SMALL_BYTES)
        for number in range(chosen.small_count):
            server.put(BUCKET, f"small/{number}", small)
        large_jobs = [("large", offset, min(RANGE_BYTES, large_bytes - offset)) for offset in range(0, large_bytes, RANGE_BYTES)]
        small_jobs = [(f"small/{number}", 0, SMALL_BYTES - 1) for number in range(chosen.small_count)]
        candidates = {
            "boto3": boto3_client(server),
            "http.client": standard_library(server),
            "urllib3": urllib3_pool(server),
            "tiercache": tiercache_path(server, "python"),
            "tiercache C": tiercache_path(server, "native"),
        }
        figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(chosen.rounds):
            for name, run in candidates.items():
                for kind, jobs, threads in (("large", large_jobs, LARGE_THREADS), ("small", small_jobs, SMALL_THREADS)):
                    wall, cpu = time.perf_counter(), time.process_time()
                    run(jobs, threads)
                    figures.setdefault((name, kind), []).append((time.perf_counter() - wall, time.process_time() - cpu))
        print(f"{'client':12} {'MB/s':>6} {'CPU s/GiB':>10} {'100 KiB GETs/s':>15} {'CPU ms each':>12}")
        for name in candidates:
            large_wall, large_cpu = (statistics.median(column) for column in zip(*figures[name, "large"], strict=True))
            small_wall, small_cpu = (statistics.median(column) for column in zip(*figures[name, "small"], strict=True))
            print(
                f"{name:12} {large_bytes / large_wall / 1e6:6.0f} {large_cpu * (1 << 30) / large_bytes:10.2f}"
                f" {chosen.small_count / small_wall:15.0f} {small_cpu / chosen.small_count * 1e3:12.2f}"
            )
        print(f"first byte of tiercache's tier (4 KiB in the middle): {_first_byte_ms(server):.2f} ms")


if __name__ == "__main__":
    main()
