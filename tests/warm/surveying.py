"""What lies in the directories of warm targets, judged by the formats alone: no target, no engine and no repair takes part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tiercache.core.manifest import Manifest, decode_manifest
from tiercache.core.record import ObjectId
from tiercache.core.stripe import (
    Generation,
    encode_shard_footer,
    encode_shard_header,
    manifest_path,
    parse_manifest_name,
    parse_shard_name,
    shard_footer_bytes,
    shard_path,
)
from tiercache.errors import Damaged
from tiercache.tiers.warm.codec import decode_stripe
from tiercache.tiers.warm.files import DRAFTS, MARKER
from tiercache.tiers.warm.isal import ErasureCode

Name = tuple[ObjectId, Generation]


@dataclass
class Seen:
    """One copy. `shards`: for each index the files that have its name. `whole`: those of them that are right in every byte."""

    manifest: Manifest
    manifests_count: int = 0
    shards: dict[int, list[Path]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[int, list[Path]] = field(default_factory=lambda: defaultdict(list))

    @property
    def objects(self) -> list[ObjectId]:
        manifest = self.manifest
        return [member.object_id for member in manifest.members] if manifest.is_pack else [manifest.object_id]

    def pieces(self, number: int) -> dict[int, bytes]:
        """The valid pieces of a stripe, whatever the rest of their files is like."""
        stripe = self.manifest.stripe(number)
        length = stripe.piece_bytes(self.manifest.geometry.data_count)
        valid = {}
        for index, paths in self.shards.items():
            for path in paths:
                piece = path.read_bytes()[stripe.piece_offset : stripe.piece_offset + length]
                if len(piece) == length and xxhash.xxh3_64_intdigest(piece) == stripe.checksums[index]:
                    valid[index] = piece
        return valid

    @property
    def is_readable(self) -> bool:
        data_count = self.manifest.geometry.data_count
        return all(len(self.pieces(number)) >= data_count for number in range(self.manifest.stripes_count))

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """(key, bytes) of all objects that it has. Raises Damaged."""
        manifest = self.manifest
        code = ErasureCode(manifest.geometry.data_count, manifest.geometry.parity_count)
        stripes = [
            bytes(decode_stripe(manifest.stripe(number), self.pieces(number), code)) for number in range(manifest.stripes_count)
        ]
        if manifest.is_pack:
            yield from ((member.key, stripe) for member, stripe in zip(manifest.members, stripes, strict=True))
        else:
            yield manifest.key, b"".join(stripes)


@dataclass
class Survey:
    copies: dict[Name, Seen]
    torn_manifests: list[Path]
    unreferenced: list[Path]
    drafts: list[Path]
    foreign: list[Path]

    def incomplete(self, targets_count: int) -> list[str]:
        """What is wrong where everything should be as if nothing had ever happened."""
        wrong = [
            f"{kind}: {path}" for kind in ("torn_manifests", "unreferenced", "drafts", "foreign") for path in getattr(self, kind)
        ]
        for seen in self.copies.values():
            geometry = seen.manifest.geometry
            if seen.manifests_count < min(geometry.parity_count + 1, targets_count):
                wrong.append(f"{seen.manifest!r}: {seen.manifests_count} manifests")
            for index in range(geometry.shards_count):
                files, whole = len(seen.shards[index]), len(seen.whole[index])
                if (files, whole) != (1, 1):
                    wrong.append(f"{seen.manifest!r}: {files} files of shard {index}, {whole} of them whole")
            homes = {path.parents[2] for paths in seen.shards.values() for path in paths}
            if len(homes) != geometry.shards_count:
                wrong.append(f"{seen.manifest!r}: shards lie on {len(homes)} targets")
        superfluous = [seen.manifest for seen in self.copies.values() if self._is_superfluous(seen)]
        return [*wrong, *(f"{manifest!r}: what it has is in older copies" for manifest in superfluous)]

    def _is_superfluous(self, seen: Seen) -> bool:
        """Is anything that it has in older copies of its kind, or has it nothing?"""
        manifest = seen.manifest
        older = {
            object_id
            for (name, generation), other in self.copies.items()
            if other.manifest.is_pack == manifest.is_pack and (generation, name) < (manifest.generation, manifest.object_id)
            for object_id in other.objects
        }
        return not seen.objects or not older.isdisjoint(seen.objects)

    def pass_over_unidentifiable(self) -> None:
        """Copies of which no manifest is left: nobody can say what they are, or that they are not needed, so they stay."""
        lost = {path.name for path in self.torn_manifests if parse_manifest_name(path.name) not in self.copies}
        self.torn_manifests = [path for path in self.torn_manifests if path.name not in lost]
        self.unreferenced = [path for path in self.unreferenced if path.name.rpartition(".")[0] not in lost]

    def contents(self) -> dict[tuple[str, str], bytes]:
        """(key, version) -> bytes of everything that is there. Raises Damaged."""
        found = {}
        for seen in self.copies.values():
            manifest = seen.manifest
            members = list(manifest.members) if manifest.is_pack else [manifest.content]
            for member, (key, data) in zip(members, seen.contents(), strict=True):
                assert member.key == key
                found[key, member.version] = data
        return found


def survey(targets: Sequence[Path]) -> Survey:
    found = Survey({}, [], [], [], [])
    for target in targets:
        for path in _files(target):
            relative = path.relative_to(target).as_posix()
            kind = relative.split("/")[0]
            if kind == DRAFTS:
                found.drafts.append(path)
            elif kind in ("manifests", "packs"):
                _look_at_manifest(found, path, relative)
            elif kind != "shards" and relative != MARKER:
                found.foreign.append(path)
    for target in targets:
        for path in _files(target / "shards"):
            _look_at_shard(found, path, path.relative_to(target).as_posix())
    return found


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if not path.is_dir())


def _look_at_manifest(found: Survey, path: Path, relative: str) -> None:
    name = parse_manifest_name(path.name)
    try:
        manifest = decode_manifest(path.read_bytes())
    except Damaged:
        found.torn_manifests.append(path)
        return
    if name is None or relative != manifest_path(*name, is_pack=manifest.is_pack):
        found.foreign.append(path)
    elif (manifest.object_id, manifest.generation) != name:
        found.torn_manifests.append(path)
    else:
        seen = found.copies.setdefault(name, Seen(manifest))
        seen.manifests_count += 1
        if list(seen.manifest.stripes()) != list(manifest.stripes()):
            found.torn_manifests.append(path)


def _look_at_shard(found: Survey, path: Path, relative: str) -> None:
    parsed = parse_shard_name(path.name)
    if parsed is None or relative != shard_path(*parsed):
        found.foreign.append(path)
        return
    object_id, generation, index = parsed
    seen = found.copies.get((object_id, generation))
    if seen is None or index >= seen.manifest.geometry.shards_count:
        found.unreferenced.append(path)
        return
    seen.shards[index].append(path)
    if _is_whole(path.read_bytes(), seen.manifest, index):
        seen.whole[index].append(path)


def _is_whole(raw: bytes, manifest: Manifest, index: int) -> bool:
    geometry = manifest.geometry
    header = encode_shard_header(manifest.object_id, manifest.generation, geometry, index, is_pack=manifest.is_pack)
    footer = encode_shard_footer(manifest.stripes(), index)
    assert len(footer) == shard_footer_bytes(manifest.stripes_count)
    if len(raw) != manifest.shard_bytes() or not raw.startswith(header) or not raw.endswith(footer):
        return False
    for stripe in manifest.stripes():
        piece = raw[stripe.piece_offset : stripe.piece_offset + stripe.piece_bytes(geometry.data_count)]
        if xxhash.xxh3_64_intdigest(piece) != stripe.checksums[index]:
            return False
    return True


def differing(survey: Survey, versions: Mapping[tuple[str, str], bytes]) -> list[str]:
    """Which of the objects that lie there are not what they should be."""
    return [key for (key, version), data in survey.contents().items() if versions.get((key, version)) != data]
