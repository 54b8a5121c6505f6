"""Files whose every block says whose it is, and a program that reads them from a mount in many ways until it is told to stop.

    python stamped.py KIND ROOT STATE SEED

KIND is one of KINDS. Keys that begin with "v" are overwritten while they are read, with the next version: a reader of the
former one may get ESTALE, and no other error. STATE is a file: its rounds so far. It ends with its standard input, and
says what it found as one JSON object. It imports nothing of tiercache or of the tests.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import random
import select
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BLOCK_BYTES = 4096
_STAMP_BYTES = 32
KINDS = ("sequential", "random", "mapped", "small", "names", "mixed")
NOTED_SECONDS = 0.02
MAX_NOTED = 20_000


def _stamp(key: str, version: int, block: int) -> bytes:
    head = struct.pack("<II8s", version, block, hashlib.blake2b(key.encode(), digest_size=8).digest())
    return head + hashlib.blake2b(head, digest_size=_STAMP_BYTES - len(head)).digest()


def content(key: str, version: int, size: int) -> bytes:
    blocks = range(-(-size // BLOCK_BYTES))
    return b"".join(_stamp(key, version, block) * (BLOCK_BYTES // _STAMP_BYTES) for block in blocks)[:size]


def version_of(key: str, data: bytes, block: int) -> int:
    """The version that all of these blocks are of. Raises ValueError for a wrong byte."""
    (version,) = struct.unpack_from("<I", data)
    for at in range(0, len(data), BLOCK_BYTES):
        piece = data[at : at + BLOCK_BYTES]
        expected = (_stamp(key, version, block + at // BLOCK_BYTES) * (BLOCK_BYTES // _STAMP_BYTES))[: len(piece)]
        if piece != expected:
            raise ValueError(f"{key}: wrong bytes in block {block + at // BLOCK_BYTES} at version {version}")
    return int(version)


class Reader:
    def __init__(self, root: str, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.names = sorted(os.listdir(root))
        self.stale_count = 0

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _some(self, *, is_large: bool | None = None, is_still: bool = False) -> str:
        names = [name for name in self.names if is_large is None or name.endswith("large") == is_large]
        return self.random.choice([name for name in names if not (is_still and name.startswith("v"))])

    def _opened(self, name: str, read: Callable[[str, int], None]) -> None:
        with self._perhaps_stale(name):
            fd = os.open(self._path(name), os.O_RDONLY)  # stale as well: the kernel tries again once, and so may the writer
            try:
                read(name, fd)
            finally:
                os.close(fd)

    @contextmanager
    def _perhaps_stale(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.ESTALE or not name.startswith("v"):
                raise
            self.stale_count += 1

    def _whole(self, name: str, fd: int) -> None:
        size = os.fstat(fd).st_size
        offset, versions = 0, set()
        while data := os.pread(fd, 1 << 20, offset):
            versions.add(version_of(name, data, offset // BLOCK_BYTES))
            offset += len(data)
        if offset != size or len(versions) > 1:
            raise ValueError(f"{name}: {offset} of {size} bytes, versions {versions}")

    def _here_and_there(self, name: str, fd: int) -> None:
        blocks = max(1, os.fstat(fd).st_size // BLOCK_BYTES)
        versions = set()
        for _ in range(20):
            block = self.random.randrange(blocks)
            versions.add(version_of(name, os.pread(fd, BLOCK_BYTES, block * BLOCK_BYTES), block))
        if len(versions) > 1:
            raise ValueError(f"{name}: versions {versions}")

    def _through_memory(self, name: str, fd: int) -> None:
        blocks = os.fstat(fd).st_size // BLOCK_BYTES
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            if self.random.random() < 0.3:
                mapped.madvise(mmap.MADV_RANDOM)
            for _ in range(20):
                block = self.random.randrange(max(1, blocks))
                version_of(name, mapped[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES], block)

    def sequential(self) -> None:
        self._opened(self._some(is_large=True), self._whole)

    def random_reads(self) -> None:
        self._opened(self._some(is_large=True), self._here_and_there)

    def mapped(self) -> None:
        self._opened(self._some(is_large=True, is_still=True), self._through_memory)

    def small(self) -> None:
        self._opened(self._some(is_large=False), self._whole)

    def walk(self) -> None:
        for place, _, names in os.walk(self.root, onerror=_raise):
            for name in names:
                with self._perhaps_stale(name):
                    os.stat(os.path.join(place, name))

    def mixed(self) -> None:
        self.random.choice(
            [self.sequential, self.random_reads, self.random_reads, self.mapped, self.small, self.small, self.walk]
        )()


def _raise(error: OSError) -> None:
    raise error


def main() -> None:
    kind, root, state, seed = sys.argv[1:]
    reader = Reader(root, int(seed))
    ways = (reader.sequential, reader.random_reads, reader.mapped, reader.small, reader.walk, reader.mixed)
    once = dict(zip(KINDS, ways, strict=True))[kind]
    errors: list[str] = []
    slow: list[tuple[float, float]] = []
    rounds_count = 0
    fd = os.open(state, os.O_WRONLY | os.O_CREAT)
    while not select.select([sys.stdin], [], [], 0)[0]:
        began = time.monotonic()
        try:
            once()
        except (OSError, ValueError) as error:
            errors.append(f"{kind}: {error}")
        seconds = time.monotonic() - began
        if seconds > NOTED_SECONDS and len(slow) < MAX_NOTED:
            slow.append((began, seconds))
        rounds_count += 1
        os.pwrite(fd, struct.pack("<Q", rounds_count), 0)
    found = {"errors": errors[:20], "slow": slow, "rounds_count": rounds_count, "stale_count": reader.stale_count}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
