"""Damage to what lies on warm targets: of every kind, and of every copy no more than it must survive."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from tests.warm.surveying import Seen, Survey
from tiercache.core.stripe import Generation, shard_path


def flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    if raw:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


KINDS = (flip, truncate, noise, remove)


def damage(seen: Survey, rng: random.Random) -> None:
    """m shards of each copy and one manifest of some are damaged or gone, and there is what dead writers leave."""
    for copy in seen.copies.values():
        geometry = copy.manifest.geometry
        for index in rng.sample(range(geometry.shards_count), geometry.parity_count):
            rng.choice(KINDS)(copy.shards[index][0], rng)
        _duplicate(copy, rng)
        _leave_behind(copy, rng)


def _duplicate(copy: Seen, rng: random.Random) -> None:
    """One shard lies on a second target, as two repairs at once leave it."""
    paths = [paths[0] for paths in copy.shards.values() if paths[0].exists()]
    path = rng.choice(paths)
    target = path.parents[2]
    others = [other for other in sorted(target.parent.glob("target*")) if not (other / path.relative_to(target)).exists()]
    if others:
        twin = rng.choice(others) / path.relative_to(target)
        twin.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, twin)


def _leave_behind(copy: Seen, rng: random.Random) -> None:
    """A draft, and a shard of a copy that was never finished."""
    path = next(iter(copy.shards.values()))[0]
    target = path.parents[2]
    (target / "drafts" / f"{rng.randrange(1 << 60):x}").write_bytes(b"half")
    manifest = copy.manifest
    orphan = target / shard_path(manifest.object_id, Generation(manifest.generation + 1), 0)
    orphan.write_bytes(b"a shard that nobody names")
