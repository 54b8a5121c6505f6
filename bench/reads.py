"""What one reader does to files, on the mount or on the local disk alike: the same code, so that its own cost is in both figures.

A job is prepared (buffers, lists, places to read) before the clock starts; `prepare` returns what is timed. Reading goes
into one buffer a thread, with `preadv`, and nothing is looked at: readers share the cores with the daemon. That the bytes
are right is checked by `Digest`, which is not timed and finds in the page cache what was read before it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

PAGE_BYTES = 4096
BLOCK_BYTES = 1 << 20

Work = Callable[[], "Outcome"]


class Outcome(msgspec.Struct):
    """`count` is what was done, in bytes, files or reads. `seconds` are single latencies by side, `digest` that of Digest."""

    count: int
    seconds: dict[str, list[float]] = {}
    digest: str = ""


class ShortRead(Exception):
    """Fewer bytes than the file has to have."""


def places(size_bytes: int, seed: int, count: int) -> list[int]:
    """`count` different page-aligned offsets of a file, the same ones for the same seed."""
    pages = random.Random(seed).sample(range(size_bytes // PAGE_BYTES), count)
    return [page * PAGE_BYTES for page in pages]


class Sequential(msgspec.Struct, tag=True):
    """From the first byte to the last in reads of 1 MiB, `rounds` times over."""

    path: str
    size_bytes: int
    rounds: int = 1

    def prepare(self) -> Work:
        buffer = [memoryview(bytearray(BLOCK_BYTES))]

        def work() -> Outcome:
            total = 0
            for _ in range(self.rounds):
                descriptor, done = os.open(self.path, os.O_RDONLY), 0
                while got := os.readv(descriptor, buffer):
                    done += got
                os.close(descriptor)
                _expect(self.path, self.size_bytes, done)
                total += done
            return Outcome(total)

        return work


class Random(msgspec.Struct, tag=True):
    """`count` reads of 4 KiB, each at another place, `rounds` times over; past the page cache with `direct`."""

    path: str
    size_bytes: int
    seed: int
    count: int
    direct: bool = False
    rounds: int = 1

    def prepare(self) -> Work:
        buffer = [memoryview(mmap.mmap(-1, PAGE_BYTES))]  # O_DIRECT wants an aligned one
        offsets = places(self.size_bytes, self.seed, self.count) * self.rounds

        def work() -> Outcome:
            descriptor = os.open(self.path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
            done = sum(os.preadv(descriptor, buffer, offset) for offset in offsets)
            os.close(descriptor)
            _expect(self.path, PAGE_BYTES * len(offsets), done)
            return Outcome(len(offsets))

        return work


class Latencies(msgspec.Struct, tag=True):
    """How long each of `count` reads of 4 KiB takes, each at another place."""

    path: str
    size_bytes: int
    seed: int
    count: int

    def prepare(self) -> Work:
        buffer = [memoryview(bytearray(PAGE_BYTES))]
        offsets = places(self.size_bytes, self.seed, self.count)

        def work() -> Outcome:
            took, clock, read = [0.0] * self.count, time.perf_counter, os.preadv
            descriptor = os.open(self.path, os.O_RDONLY)
            for number, offset in enumerate(offsets):
                began = clock()
                got_bytes = read(descriptor, buffer, offset)
                took[number] = clock() - began
                if got_bytes != PAGE_BYTES:
                    raise ShortRead(f"{self.path}: read {got_bytes} bytes instead of {PAGE_BYTES}")
            os.close(descriptor)
            return Outcome(self.count, seconds={"read": took})

        return work


class Churn(msgspec.Struct, tag=True):
    """Read files from begin to end, one after the other, over and over until it is killed: what causes fills."""

    paths: list[str]

    def prepare(self) -> Work:
        return self._read

    def _read(self) -> Outcome:
        buffer = [memoryview(bytearray(BLOCK_BYTES))]
        for path in itertools.cycle(self.paths):
            descriptor = os.open(path, os.O_RDONLY)
            while os.readv(descriptor, buffer):
                pass
            os.close(descriptor)
        raise ShortRead("there is nothing to read")


class Files(msgspec.Struct, tag=True):
    """Open, read and close each file, in `threads` threads."""

    paths: list[str]
    size_bytes: int
    threads: int

    def prepare(self) -> Work:
        shares = [self.paths[first :: self.threads] for first in range(self.threads)]
        if self.threads == 1:
            return lambda: Outcome(self._read(self.paths))
        pool = ThreadPoolExecutor(self.threads)
        return lambda: Outcome(sum(pool.map(self._read, shares)))

    def _read(self, paths: list[str]) -> int:
        buffer = [memoryview(bytearray(self.size_bytes + 1))]  # one more: the read that finds the end is saved
        for path in paths:
            descriptor, done = os.open(path, os.O_RDONLY), 0
            while done < self.size_bytes and (got := os.preadv(descriptor, [buffer[0][done:]] if done else buffer, done)):
                done += got
            os.close(descriptor)
            _expect(path, self.size_bytes, done)
        return len(paths)


class Names(msgspec.Struct, tag=True):
    """List a directory."""

    path: str

    def prepare(self) -> Work:
        return lambda: Outcome(len(os.listdir(self.path)))


class Stats(msgspec.Struct, tag=True):
    """`stat` of each path, `rounds` times over."""

    paths: list[str]
    size_bytes: int
    rounds: int

    def prepare(self) -> Work:
        def work() -> Outcome:
            for _ in range(self.rounds):
                for path in self.paths:
                    size_bytes = os.stat(path).st_size
                    if size_bytes != self.size_bytes:
                        raise ShortRead(f"{path}: stat says {size_bytes} bytes instead of {self.size_bytes}")
            return Outcome(len(self.paths) * self.rounds)

        return work


class Digest(msgspec.Struct, tag=True):
    """xxh3 of files one after the other, or of the places that `Random` reads (`count` > 0)."""

    paths: list[str]
    size_bytes: int = 0
    seed: int = 0
    count: int = 0

    def prepare(self) -> Work:
        return self._hash

    def _hash(self) -> Outcome:
        digest, buffer, total = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES)), 0
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            if self.count:
                for offset in places(self.size_bytes, self.seed, self.count):
                    total += os.preadv(descriptor, [buffer[:PAGE_BYTES]], offset)
                    digest.update(buffer[:PAGE_BYTES])
            else:
                while got := os.readv(descriptor, [buffer]):
                    digest.update(buffer[:got])
                    total += got
            os.close(descriptor)
        return Outcome(total, digest=digest.hexdigest())


class Lacking(msgspec.Struct, tag=True):
    """How many of the files of a mount have no complete hot copy."""

    paths: list[str]

    def prepare(self) -> Work:
        return lambda: Outcome(sum(not os.getxattr(path, "user.tiercache.residency").startswith(b"hot,") for path in self.paths))


class Forget(msgspec.Struct, tag=True):
    """Ask the kernel to drop the pages of these files, as far as a user may."""

    paths: list[str]

    def prepare(self) -> Work:
        def work() -> Outcome:
            for path in self.paths:
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
            return Outcome(len(self.paths))

        return work


def _expect(path: str, wanted_bytes: int, got_bytes: int) -> None:
    if got_bytes != wanted_bytes:
        raise ShortRead(f"{path}: read {got_bytes} bytes instead of {wanted_bytes}")
