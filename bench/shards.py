"""What rows of the warm tier are compared with: the same bytes written, encoded and read by plain code, without a daemon.

`Evict` is the other side: the request of `tiercache evict`, from an interpreter that runs already: its start is in no figure.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.reads import BLOCK_BYTES, Outcome, ShortRead, Work

if TYPE_CHECKING:
    from tiercache.core.manifest import Manifest

CHUNK_BYTES = 8 << 20
WRITE_BYTES = 1 << 20  # as `dd bs=1M`: with more the page cache costs several times as much, at times
POLL_SECONDS = 0.01
ENCODED_BYTES = 64 << 20  # in memory; encoded over and over until all is done


class NotDone(Exception):
    """The daemon did something else than what was asked."""


class Evict(msgspec.Struct, tag=True):
    """Have the daemon at `socket` demote (or drop) `paths`, until it says that this is done."""

    socket: str
    paths: list[str]
    to: str

    def prepare(self) -> Work:
        from tiercache.admin.client import Client
        from tiercache.admin.messages import EvictRequest

        client = Client(self.socket)
        client.status()
        request = msgspec.convert({"paths": self.paths, "to": self.to}, EvictRequest)

        def work() -> Outcome:
            started = client.evict(request)
            while (status := client.job(started.job)).state == "running":
                time.sleep(POLL_SECONDS)
            gone_count = sum(status.counts.get(kind, 0) for kind in ("demoted", "already", "dropped"))
            if status.state != "done" or gone_count != status.total_count:
                raise NotDone(f"evict: {status.state}, {status.counts} of {status.total_count} {status.error}")
            return Outcome(status.total_bytes)

        return work


class Series(msgspec.Struct, tag=True):
    """Files one after the other, each from begin to end in reads of 1 MiB."""

    paths: list[str]
    size_bytes: int

    def prepare(self) -> Work:
        buffer = [memoryview(bytearray(BLOCK_BYTES))]

        def work() -> Outcome:
            for path in self.paths:
                descriptor, done = os.open(path, os.O_RDONLY), 0
                while got := os.readv(descriptor, buffer):
                    done += got
                os.close(descriptor)
                if done != self.size_bytes:
                    raise ShortRead(f"{path}: read {done} bytes instead of {self.size_bytes}")
            return Outcome(self.size_bytes * len(self.paths))

        return work


class Spread(msgspec.Struct, tag=True):
    """Read files, and write (k+m)/k of the bytes of each into k+m new files, which are made durable."""

    paths: list[str]
    directories: list[str]
    data_count: int

    def prepare(self) -> Work:
        buffer = memoryview(bytearray(CHUNK_BYTES))

        def work() -> Outcome:
            return Outcome(sum(self._spread(path, buffer) for path in self.paths))

        return work

    def _spread(self, path: str, buffer: memoryview) -> int:
        source, total_bytes = os.open(path, os.O_RDONLY), 0
        copies = [os.open(Path(directory, Path(path).name), os.O_CREAT | os.O_WRONLY, 0o600) for directory in self.directories]
        while got_bytes := os.readv(source, [buffer]):
            length = -(-got_bytes // self.data_count)
            pieces = [buffer[begin : begin + length] for begin in range(0, got_bytes, length)]
            for copy, piece in zip(copies, itertools.cycle(pieces), strict=False):
                _write(copy, piece)
            total_bytes += got_bytes
        os.close(source)
        for copy, directory in zip(copies, self.directories, strict=True):
            os.fsync(copy)
            os.close(copy)
            _sync_directory(directory)
        return total_bytes


class Encode(msgspec.Struct, tag=True):
    """Compress, encode and checksum chunks of a file that are in memory, `total_bytes` in all, in `threads` threads."""

    path: str
    total_bytes: int
    data_count: int
    parity_count: int
    zstd_level: int
    threads: int

    def prepare(self) -> Work:
        from tiercache.tiers.warm.codec import encode_stripe
        from tiercache.tiers.warm.isal import ErasureCode

        with open(self.path, "rb") as file:
            chunks = list(iter(lambda: file.read(CHUNK_BYTES), b""))[: ENCODED_BYTES // CHUNK_BYTES]
        code = ErasureCode(self.data_count, self.parity_count)
        pool = ThreadPoolExecutor(self.threads)
        list(pool.map(lambda chunk: encode_stripe(chunk, self.zstd_level, code), chunks[: self.threads]))
        wanted = list(itertools.islice(itertools.cycle(chunks), -(-self.total_bytes // CHUNK_BYTES)))

        def work() -> Outcome:
            return Outcome(sum(pool.map(lambda chunk: encode_stripe(chunk, self.zstd_level, code).logical_bytes, wanted)))

        return work


class Shards(msgspec.Struct, tag=True):
    """Read the k data shards of objects, stripe by stripe; join the pieces, and decompress what is a frame.

    `keys` are the objects, `targets` the directories with their shards.
    """

    keys: list[str]
    targets: list[str]

    def prepare(self) -> Work:
        plans = [_plan(manifest, self.targets) for manifest in _manifests(self.keys, self.targets)]
        buffer = memoryview(bytearray(max(cut.most_bytes for cut in plans)))

        def work() -> Outcome:
            return Outcome(sum(_read_object(plan, buffer) for plan in plans))

        return work


class _Cut(msgspec.Struct):
    """Of one object: its data shards, and (offset, piece bytes, frame bytes, is it plain, logical bytes) of each stripe."""

    shards: list[str]
    stripes: list[tuple[int, int, int, bool, int]]

    @property
    def most_bytes(self) -> int:
        return max(piece_bytes for _, piece_bytes, *_ in self.stripes) * len(self.shards)


def _manifests(keys: Sequence[str], targets: Sequence[str]) -> list[Manifest]:
    from tiercache.core.manifest import decode_manifest

    raws = {path.name: path.read_bytes() for target in targets for path in Path(target, "manifests").glob("*/*")}
    found = {manifest.key: manifest for manifest in map(decode_manifest, raws.values())}
    return [found[key] for key in keys]


def _plan(manifest: Manifest, targets: Sequence[str]) -> _Cut:
    from tiercache.core.stripe import shard_path

    data_count = manifest.geometry.data_count
    names = [shard_path(manifest.object_id, manifest.generation, index) for index in range(data_count)]
    shards = [next(str(Path(target, name)) for target in targets if Path(target, name).exists()) for name in names]
    stripes = [
        (stripe.piece_offset, stripe.piece_bytes(data_count), stripe.frame_bytes, stripe.is_plain, stripe.logical_bytes)
        for stripe in manifest.stripes()
    ]
    return _Cut(shards, stripes)


def _read_object(cut: _Cut, buffer: memoryview) -> int:
    import zstandard

    decompress: Callable[..., bytes] = zstandard.ZstdDecompressor().decompress
    files, total_bytes = [os.open(path, os.O_RDONLY) for path in cut.shards], 0
    for offset, piece_bytes, frame_bytes, is_plain, logical_bytes in cut.stripes:
        for index, file in enumerate(files):
            if os.preadv(file, [buffer[index * piece_bytes : (index + 1) * piece_bytes]], offset) != piece_bytes:
                raise ShortRead(f"{cut.shards[index]} is too short")
        total_bytes += logical_bytes if is_plain else len(decompress(buffer[:frame_bytes]))
    for file in files:
        os.close(file)
    return total_bytes


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:WRITE_BYTES]) :]


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)
