"""What lies on the targets, as `du` counts it, against what the files have: parity and little else, and texts take less."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting
from tests.fuse.warm import KIB, MIB, Targets, evict_all
from tests.servers.proxy import Proxy

DATA_COUNT, PARITY_COUNT = 4, 2
PARITY_RATIO = (DATA_COUNT + PARITY_COUNT) / DATA_COUNT
CORPUS_PLACES = ("common-licenses", "doc", "man")
CORPUS_BYTES = 40 * MIB
LEAST_CORPUS_BYTES = 4 * MIB
VOLUME_BYTES = 4 * MIB


class Stored:
    """Files of a bucket that were read through a mount, and then evicted to the warm tier."""

    def __init__(self, bucket: Bucket, proxy: Proxy, mounting: Mounting, place: Path) -> None:
        self.targets = Targets(place / "warm", DATA_COUNT, PARITY_COUNT)
        self._bucket = bucket
        self._mount: Mount = mounting(bucket, via=proxy, options=self.targets.options)
        self._contents: dict[str, bytes] = {}

    def add(self, name: str, data: bytes) -> None:
        self._bucket.put(name, data)
        self._contents[name] = data

    def ratio(self) -> float:
        """Bytes on targets for each byte of a file."""
        for name, data in self._contents.items():
            assert (self._mount.root / name).read_bytes() == data
        counts = evict_all(self._mount)
        assert counts["demoted"] == len(self._contents)
        assert not self.targets.files("drafts")
        return self.targets.used_bytes() / sum(map(len, self._contents.values()))


@pytest.fixture
def stored(bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path) -> Stored:
    return Stored(bucket, proxy, mounting, tmp_path)


def test_large_files_take_their_parity_and_one_percent(stored: Stored) -> None:
    rng = random.Random(1)
    for number in range(2):
        stored.add(f"large/{number}", rng.randbytes(64 * MIB))
    assert PARITY_RATIO <= stored.ratio() <= PARITY_RATIO + 0.01
    assert len(stored.targets.files("manifests")) == 2 * (PARITY_COUNT + 1)


def test_small_files_share_packs_and_take_five_percent_more_at_most(stored: Stored) -> None:
    rng = random.Random(2)
    for number in range(400):
        stored.add(f"small/{number}", rng.randbytes(100 * KIB))
    assert PARITY_RATIO <= stored.ratio() <= PARITY_RATIO + 0.05
    assert not stored.targets.files("manifests")


def test_texts_take_a_third_before_parity(stored: Stored) -> None:
    """Licences, manuals and what packages say of themselves, in volumes of some MiB, as corpora are kept."""
    volumes = list(_volumes(_texts(Path("/usr/share"))))
    corpus_bytes = sum(map(len, volumes))
    if corpus_bytes < LEAST_CORPUS_BYTES:
        pytest.skip(f"only {corpus_bytes >> 10} KiB of texts below /usr/share")
    for number, volume in enumerate(volumes):
        stored.add(f"corpus/{number:03}", volume)
    assert stored.ratio() / PARITY_RATIO <= 1 / 3


def _texts(share: Path) -> Iterator[bytes]:
    """Sorted by path, so that the corpus is the same every time; what is no text is left out."""
    for place in CORPUS_PLACES:
        for path in sorted((share / place).rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            with suppress(OSError, EOFError, UnicodeDecodeError):
                raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                raw.decode()
                if b"\0" not in raw:
                    yield raw


def _volumes(texts: Iterator[bytes]) -> Iterator[bytes]:
    volume, total_bytes = bytearray(), 0
    for text in texts:
        volume += text
        total_bytes += len(text)
        if len(volume) >= VOLUME_BYTES:
            yield bytes(volume)
            volume = bytearray()
        if total_bytes >= CORPUS_BYTES:
            break
    if volume:
        yield bytes(volume)
