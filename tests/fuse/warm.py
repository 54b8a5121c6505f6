"""Mounts with a warm tier: targets side by side, and what lies on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tests.fuse.mount import Mount, used_bytes
from tests.servers.process import wait_until

KIB, MIB = 1 << 10, 1 << 20


class Targets:
    """Directories below one place. `options` are those of `tiercache mount`."""

    def __init__(self, place: Path, data_count: int, parity_count: int) -> None:
        self.data_count, self.parity_count = data_count, parity_count
        self.paths = [place / f"t{position:02d}" for position in range(data_count + parity_count)]
        place.mkdir(exist_ok=True)
        for path in self.paths:
            path.mkdir()

    @property
    def options(self) -> list[str]:
        given = [part for path in self.paths for part in ("--warm-target", str(path))]
        return [*given, "--ec", f"{self.data_count}+{self.parity_count}"]

    def files(self, kind: str) -> list[Path]:
        """`shards`, `manifests`, `packs` or `drafts`."""
        return sorted(found for path in self.paths for found in (path / kind).rglob("*") if found.is_file())

    def used_bytes(self) -> int:
        return sum(used_bytes(path) for path in self.paths)


def a_mixed_dataset(directory: Path, total_bytes: int, seed: int = 1, sizes_bytes: Sequence[int] = ()) -> list[Path]:
    """Small and large files with bytes that do not shrink, and texts that do."""
    rng = random.Random(seed)
    sizes = sizes_bytes or (1, 4 * KIB, 100 * KIB, 100 * KIB, 700 * KIB, 3 * MIB, 9 * MIB + 17)
    directory.mkdir()
    paths: list[Path] = []
    written_bytes = 0
    while written_bytes < total_bytes:
        path = directory / f"d{len(paths) % 7}" / f"{len(paths):05d}"
        path.parent.mkdir(exist_ok=True)
        size_bytes = sizes[len(paths) % len(sizes)]
        if len(paths) % 5 == 4:
            line = f"{path.name}: what is written here over and over is not of interest, {rng.random()}\n".encode()
            path.write_bytes((line * (size_bytes // len(line) + 1))[:size_bytes])
        else:
            path.write_bytes(rng.randbytes(size_bytes))
        paths.append(path)
        written_bytes += size_bytes
    return paths


def read_all(mount: Mount, source: Path, paths: Sequence[Path], seed: int) -> None:
    """Every file once, in random order, compared byte by byte."""
    order = list(paths)
    random.Random(seed).shuffle(order)
    for path in order:
        assert (mount.root / path.relative_to(source)).read_bytes() == path.read_bytes(), path


def evict_all(mount: Mount) -> dict[str, int]:
    """Everything hot goes to the warm tier; the counts of `evict`."""
    ran = mount.tiercache("evict", mount.root, "--to", "warm", "--json")
    assert ran.code == 0, (ran.out, ran.err)
    counts: dict[str, int] = ran.json["counts"]
    return counts


def demoted_count(mount: Mount) -> int:
    found = mount.metrics()
    return int(sum(value for name, value in found.items() if name.startswith("tiercache_demotions_total{")))


def await_idle(mount: Mount) -> None:
    """Until nothing is being demoted any more."""
    seen = [-1]

    def settled() -> bool:
        before, seen[0] = seen[0], demoted_count(mount)
        return before == seen[0]

    wait_until(settled, "an end of demotions")
