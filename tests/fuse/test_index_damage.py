"""A damaged index is a cache that is rebuilt: the mount works each time and says what it did, and no byte is wrong."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting, difference
from tests.servers.proxy import Proxy

PAGE_BYTES = 4096


def truncate(to_bytes: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(index: Path) -> None:
        data = index / "data.mdb"
        os.truncate(data, to_bytes(data.stat().st_size))

    return damage


def noise(page: int) -> Callable[[Path], None]:
    """One page of noise; negative numbers count from the end."""

    def damage(index: Path) -> None:
        data = index / "data.mdb"
        with open(data, "r+b") as file:
            pages_count = data.stat().st_size // PAGE_BYTES
            file.seek(page % pages_count * PAGE_BYTES)
            file.write(random.Random(page).randbytes(PAGE_BYTES))

    return damage


def both_roots(index: Path) -> None:
    for page in (0, 1):
        noise(page)(index)


def foreign(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"this is not an index\n" * 1000)


TELLING: dict[str, Callable[[Path], None]] = {
    "truncated-to-half": truncate(lambda size: size // 2),
    "emptied": truncate(lambda _: 0),
    "deleted": lambda index: (index / "data.mdb").unlink(),
    "both-roots-noise": both_roots,
    "foreign": foreign,
}
QUIET: dict[str, Callable[[Path], None]] = {
    **{f"noise-in-page-{page}": noise(page) for page in (0, 3, -1)},
    "without-its-directory": shutil.rmtree,
    "log-truncated": lambda index: os.truncate(index / "objects.log", 777),
}
"""A page may be free, or one of two roots: then there is nothing to tell. What is served must be right all the same."""


@pytest.fixture
def filled(bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path) -> tuple[Mount, Path]:
    source = tmp_path / "source"
    rng = random.Random(8)
    for number in range(60):
        place = source / f"dir-{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"file-{number:03d}").write_bytes(rng.randbytes(rng.choice([0, 1, 5000, 300_000])))
    (source / "large").write_bytes(rng.randbytes(9 << 20))
    bucket.upload(source)
    mount = mounting(bucket, via=proxy)
    assert difference(source, mount.root) == ""
    return mount, source


def damaged(mount: Mount, damage: Callable[[Path], None]) -> list[str]:
    """Unmounts, damages, mounts; the notices."""
    mount.umount()
    damage(mount.hot / "index")
    notices: list[str] = mount.start()["notices"]
    return notices


def test_a_lost_index_is_rebuilt_and_the_hot_files_are_found_again(filled: tuple[Mount, Path], proxy: Proxy) -> None:
    """One loss after the other on the same cache: each mount starts from what the one before has made of it."""
    mount, source = filled
    for how, damage in TELLING.items():
        notices = damaged(mount, damage)
        assert any("index" in notice and "rebuilt" in notice for notice in notices), (how, notices)
        with proxy.recording() as seen:
            assert difference(source, mount.root) == "", how
        assert seen.object_bytes == 0, f"{how}: the sidecar log knows what is hot"


def test_no_damage_of_the_index_leads_to_a_wrong_byte(filled: tuple[Mount, Path]) -> None:
    mount, source = filled
    for how, damage in QUIET.items():
        damaged(mount, damage)
        assert difference(source, mount.root) == "", how
