"""What the mount is compared with when nothing is hot: boto3 as it is usually called, and bare ranged GETs.

The boto3 client is made before the clock starts, its connections are not: a daemon that has just been mounted has none either.
`Direct` leaves out even the signing (a URL signed beforehand over a connection that is kept), so that nothing
can be quicker.
"""

from __future__ import annotations

import http.client
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from bench.reads import PAGE_BYTES, Outcome, ShortRead, Work, places

if TYPE_CHECKING:
    from tests.servers.s3 import S3Account

RANGE_BYTES = 8 << 20
DOWNLOAD_THREADS, OBJECT_THREADS = 8, 16
URL_SECONDS = 3600
REQUEST_SECONDS = 60.0


class Store(msgspec.Struct, frozen=True):
    """An S3 server and the bucket with the data."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str

    def account(self) -> S3Account:
        from tests.servers.s3 import S3Account  # boto3 takes a quarter of a second, which readers of files need not wait

        return S3Account(self.endpoint_url, self.access_key, self.secret_key)

    def signed_path(self, key: str) -> str:
        """Path and query of a GET of `key` that needs no further signature."""
        url: str = self.account().client.generate_presigned_url(
            "get_object", Params={"Bucket": self.bucket, "Key": key}, ExpiresIn=URL_SECONDS
        )
        return url.removeprefix(self.endpoint_url)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.endpoint_url.removeprefix("http://"), timeout=REQUEST_SECONDS)


class Download(msgspec.Struct, tag=True):
    """boto3's `download_file` with 8 threads and ranges of 8 MiB."""

    store: Store
    key: str
    path: str

    def prepare(self) -> Work:
        from boto3.s3.transfer import TransferConfig

        client = self.store.account().client
        config = TransferConfig(
            multipart_threshold=RANGE_BYTES,
            multipart_chunksize=RANGE_BYTES,
            max_concurrency=DOWNLOAD_THREADS,
            preferred_transfer_client="classic",
        )

        def work() -> Outcome:
            client.download_file(self.store.bucket, self.key, self.path, Config=config)
            return Outcome(os.stat(self.path).st_size)

        return work


class Objects(msgspec.Struct, tag=True):
    """boto3's `get_object` of each key, read to its end, in 16 threads."""

    store: Store
    keys: list[str]
    size_bytes: int

    def prepare(self) -> Work:
        client: Any = self.store.account().client
        pool = ThreadPoolExecutor(OBJECT_THREADS)

        def get(key: str) -> None:
            got_bytes = len(client.get_object(Bucket=self.store.bucket, Key=key)["Body"].read())
            if got_bytes != self.size_bytes:
                raise ShortRead(f"s3://{self.store.bucket}/{key}: read {got_bytes} bytes instead of {self.size_bytes}")

        def work() -> Outcome:
            return Outcome(sum(1 for _ in pool.map(get, self.keys)))

        return work


class Direct(msgspec.Struct, tag=True):
    """4 KiB of an object at each of `count` places over one connection, which is open already unless `connect`."""

    store: Store
    key: str
    size_bytes: int
    seed: int
    count: int
    connect: bool = False

    def prepare(self) -> Work:
        target, offsets = self.store.signed_path(self.key), places(self.size_bytes, self.seed, self.count)
        connection = self.store.connection()
        if not self.connect:
            ranged_get(connection, target, 0)

        def work() -> Outcome:
            for offset in offsets:
                ranged_get(connection, target, offset)
            return Outcome(self.count)

        return work


class FirstByte(msgspec.Struct, tag=True):
    """Open, 4 KiB in the middle half of a cold file, close; and a direct GET of 4 KiB at another place nobody read. In turns.

    Different places, because the store's server would answer the second of two equal requests more quickly.
    """

    path: str
    store: Store
    key: str
    size_bytes: int
    seed: int
    count: int

    def prepare(self) -> Work:
        target, connection = self.store.signed_path(self.key), self.store.connection()
        ranged_get(connection, target, 0)
        first = self.size_bytes // 4
        offsets = [first + offset for offset in places(self.size_bytes // 2, self.seed, 2 * self.count)]
        os.stat(self.path)
        buffer = [memoryview(bytearray(PAGE_BYTES))]

        def mount(offset: int) -> None:
            descriptor = os.open(self.path, os.O_RDONLY)
            got_bytes = os.preadv(descriptor, buffer, offset)
            os.close(descriptor)
            if got_bytes != PAGE_BYTES:
                raise ShortRead(f"{self.path}: read {got_bytes} bytes instead of {PAGE_BYTES}")

        def direct(offset: int) -> None:
            ranged_get(connection, target, offset)

        def work() -> Outcome:
            took: dict[str, list[float]] = {"mount": [], "direct": []}
            sides = (("mount", mount), ("direct", direct))
            for turn in range(self.count):
                for name, read in sides if turn % 2 == 0 else reversed(sides):
                    began = time.perf_counter()
                    read(offsets.pop())
                    took[name].append(time.perf_counter() - began)
            return Outcome(self.count, seconds=took)

        return work


def ranged_get(connection: http.client.HTTPConnection, target: str, offset: int) -> None:
    """4 KiB of an object. Raises ShortRead when the answer is not exactly that."""
    connection.request("GET", target, headers={"Range": f"bytes={offset}-{offset + PAGE_BYTES - 1}"})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != http.HTTPStatus.PARTIAL_CONTENT or len(body) != PAGE_BYTES:
        raise ShortRead(f"a GET of {PAGE_BYTES} bytes was answered with status {answer.status} and {len(body)} bytes")
