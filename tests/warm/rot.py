"""Bits that flip and files that lose their end, anywhere on the targets: as many as a copy must survive, and no more."""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.warm.surveying import Name, Seen, survey
from tiercache.core.manifest import Manifest
from tiercache.core.stripe import manifest_path

FLIPS_RATIO = 0.8
SHARDS_RATIO = 0.7


class Rot:
    """Of each stripe at most m pieces are damaged, of each copy at most m manifests; headers and footers as it comes.

    `counts` are those of single damages by what they hit, `files` all that are not any more what they were.
    """

    def __init__(self, targets: Sequence[Path], rng: random.Random) -> None:
        self.files: set[Path] = set()
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._flipped: set[tuple[Path, int]] = set()
        self._bad_pieces: dict[tuple[Name, int], set[int]] = defaultdict(set)
        self._bad_manifests: dict[Name, set[Path]] = defaultdict(set)
        self._shards: list[tuple[Path, Name, Seen, int]] = []
        self._manifests: list[tuple[Path, Name, Manifest]] = []
        self._packs: list[tuple[Path, Name, Manifest]] = []
        for name, seen in survey(targets).copies.items():
            self._shards += [(path, name, seen, index) for index, paths in seen.shards.items() for path in paths]
            relative = manifest_path(*name, is_pack=seen.manifest.is_pack)
            manifests = self._packs if seen.manifest.is_pack else self._manifests
            manifests += [(target / relative, name, seen.manifest) for target in targets if (target / relative).exists()]

    def strike(self, count: int) -> None:
        """So many times, wherever chance will have it."""
        while self.counts.total() < count:
            if self._rng.random() < SHARDS_RATIO:
                self._strike_shard(*self._rng.choice(self._shards))
            else:
                self._strike_manifest(*self._rng.choice(self._rng.choice((self._manifests, self._packs))))

    def _strike_shard(self, path: Path, name: Name, seen: Seen, index: int) -> None:
        size_bytes = path.stat().st_size
        if not size_bytes:
            return
        offset = self._rng.randrange(size_bytes)
        is_flip = self._rng.random() < FLIPS_RATIO
        end = offset + 1 if is_flip else seen.manifest.shard_bytes()
        hit = _stripes_between(seen.manifest, offset, end)
        if any(len(self._bad_pieces[name, number] | {index}) > seen.manifest.geometry.parity_count for number in hit):
            return
        if self._damage(path, offset, "shard", is_flip=is_flip):
            for number in hit:
                self._bad_pieces[name, number].add(index)

    def _strike_manifest(self, path: Path, name: Name, manifest: Manifest) -> None:
        size_bytes = path.stat().st_size
        if not size_bytes or len(self._bad_manifests[name] | {path}) > manifest.geometry.parity_count:
            return
        is_flip = self._rng.random() < FLIPS_RATIO
        if self._damage(path, self._rng.randrange(size_bytes), "pack" if manifest.is_pack else "manifest", is_flip=is_flip):
            self._bad_manifests[name].add(path)

    def _damage(self, path: Path, offset: int, what: str, *, is_flip: bool) -> bool:
        if is_flip and (path, offset) in self._flipped:
            return False  # once more, and it might be right again
        if is_flip:
            with open(path, "r+b") as file:
                file.seek(offset)
                [byte] = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))
            self._flipped.add((path, offset))
        else:
            os.truncate(path, offset)
        self.files.add(path)
        self.counts[f"{what}: {'flip' if is_flip else 'cut'}"] += 1
        return True


def _stripes_between(manifest: Manifest, begin: int, end: int) -> list[int]:
    """Those that have bytes there, in each shard file."""
    data_count = manifest.geometry.data_count
    return [
        number
        for number, stripe in enumerate(manifest.stripes())
        if stripe.piece_offset < end and begin < stripe.piece_offset + stripe.piece_bytes(data_count)
    ]
