"""Warm copies made by hand: targets in directories, and copies written to them, with nothing but the formats and the codec."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tiercache.core.manifest import Manifest, ManifestDraft, Member
from tiercache.core.record import ObjectId, ObjectRef, object_id
from tiercache.core.stripe import (
    Generation,
    Geometry,
    encode_shard_footer,
    encode_shard_header,
    manifest_path,
    shard_path,
)
from tiercache.tiers.tier import MemorySink
from tiercache.tiers.warm.catalogue import Catalogues
from tiercache.tiers.warm.codec import EncodedStripe, encode_stripe
from tiercache.tiers.warm.copies import Copies
from tiercache.tiers.warm.hedging import Hedging
from tiercache.tiers.warm.isal import ErasureCode
from tiercache.tiers.warm.pieces import Pieces, Wish
from tiercache.tiers.warm.shards import Warm
from tiercache.tiers.warm.target import Deadlines, Target
from tiercache.tiers.warm.targets import Targets, open_targets

SOURCE_ID = "store/bucket"
CHUNK_BYTES = 64 << 10


def ref_of(key: str, data: bytes) -> ObjectRef:
    version = f"{hashlib.md5(data).hexdigest()}:{len(data)}"
    return ObjectRef("data", key, version, len(data), 1_700_000_000, object_id(SOURCE_ID, key, version))


class Seen:
    """What reads and repairs tell."""

    def __init__(self) -> None:
        self.degraded_count = 0
        self.hedged_count = 0
        self.damages: list[str] = []
        self.wishes: list[Wish] = []

    def degraded(self) -> None:
        self.degraded_count += 1

    def hedged(self, count: int) -> None:
        self.hedged_count += count

    def damaged(self, kind: str) -> None:
        self.damages.append(kind)

    def wished(self, wish: Wish) -> None:
        self.wishes.append(wish)


class Flash:
    """Some targets, and the warm tier over them."""

    def __init__(self, targets: Targets, geometry: Geometry, nursery: trio.Nursery) -> None:
        self.targets = targets
        self.geometry = geometry
        self.nursery = nursery
        self.is_sole = False  # what is written
        self.code = ErasureCode(geometry.data_count, geometry.parity_count)
        self.seen = Seen()
        self.hedging = Hedging(nursery)
        self.catalogues = Catalogues(targets)
        self.copies = Copies(targets, self.catalogues, self.hedging, geometry.parity_count)
        self.pieces = Pieces(targets, self.hedging, self.seen)
        self.warm = Warm(self.copies, self.pieces, self.seen)

    def another_node(self) -> Flash:
        """The same targets, and nothing known of what lies on them."""
        return Flash(self.targets, self.geometry, self.nursery)

    async def write(self, key: str, data: bytes, *, generation: int = 1 << 20, without: Sequence[int] = ()) -> Manifest:
        """A copy of an object, one stripe a chunk; the shards `without` are not written."""
        ref = ref_of(key, data)
        draft = ManifestDraft.of_object(
            ref, SOURCE_ID, Generation(generation), self.geometry, chunk_bytes=CHUNK_BYTES, is_sole=self.is_sole
        )
        chunks = [data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES)]
        stripes = [encode_stripe(chunk, 3, self.code) for chunk in chunks]
        for stripe in stripes:
            _add(draft, stripe, None)
        return await self._put(draft, stripes, without)

    async def write_pack(self, objects: dict[str, bytes], *, generation: int = 1 << 20, seed: int = 1) -> Manifest:
        identity = ObjectId(random.Random(seed).randbytes(20))
        draft = ManifestDraft(identity, Generation(generation), self.geometry, is_sole=self.is_sole)
        stripes = []
        for key, data in objects.items():
            ref = ref_of(key, data)
            stripes.append(encode_stripe(data, 3, self.code))
            _add(draft, stripes[-1], Member(ref.object_id, SOURCE_ID, key, ref.version, ref.size_bytes, ref.mtime_seconds))
        return await self._put(draft, stripes, ())

    async def _put(self, draft: ManifestDraft, stripes: list[EncodedStripe], without: Sequence[int]) -> Manifest:
        chosen = self.targets.for_shards(draft.object_id, self.geometry.shards_count)
        assert len(chosen) == self.geometry.shards_count
        placed: list[bytes | None] = [None] * len(chosen)
        for index, target in enumerate(chosen):
            if index in without:
                continue
            placed[index] = target.uuid
            parts = [encode_shard_header(draft.object_id, draft.generation, draft.geometry, index, is_pack=draft.is_pack)]
            parts += [bytes(stripe.pieces[index]) for stripe in stripes]
            parts += [encode_shard_footer(draft.stripes(), index)]
            await target.put(shard_path(draft.object_id, draft.generation, index), b"".join(parts))
        manifest = draft.finish(placed)
        path = manifest_path(draft.object_id, draft.generation, is_pack=draft.is_pack)
        for target in self.targets.ordered(draft.object_id)[: self.geometry.parity_count + 1]:
            await target.put(path, manifest.encode())
        return manifest

    async def read(self, key: str, data: bytes, offset: int = 0, length: int | None = None) -> bytes:
        ref = ref_of(key, data)
        wanted = len(data) - offset if length is None else length
        sink = MemorySink(wanted)
        await self.warm.read(ref, offset, wanted, sink)
        assert sink.received_bytes == wanted
        return bytes(sink.view)

    def holder(self, manifest: Manifest, index: int) -> Target:
        """The target that has the shard according to the manifest."""
        uuid = manifest.placed[index]
        assert uuid is not None
        return self.targets.by_uuid[uuid]

    def shard(self, manifest: Manifest, index: int) -> Path:
        path = shard_path(manifest.object_id, manifest.generation, index)
        return Path(self.holder(manifest, index).path, path)

    def manifests(self, manifest: Manifest) -> list[Path]:
        path = manifest_path(manifest.object_id, manifest.generation, is_pack=manifest.is_pack)
        return [Path(target.path, path) for target in self.targets.all if Path(target.path, path).exists()]


def _add(draft: ManifestDraft, stripe: EncodedStripe, member: Member | None) -> None:
    draft.add(
        stripe.logical_bytes,
        stripe.frame_bytes,
        is_plain=stripe.is_plain,
        digest=stripe.digest,
        checksums=stripe.checksums,
        member=member,
    )


@asynccontextmanager
async def flash(
    directory: Path, geometry: str = "4+2", *, targets_count: int | None = None, deadlines: Deadlines | None = None
) -> AsyncIterator[Flash]:
    """As many new targets below `directory` as the geometry has shards, or so many."""
    data_count, parity_count = map(int, geometry.split("+"))
    count = targets_count or data_count + parity_count
    paths = [str(directory / f"target-{number}") for number in range(count)]
    mountpoint = directory / "mount"
    mountpoint.mkdir(exist_ok=True)
    targets = await open_targets(paths, directory / "targets.json", mountpoint, min_free_ratio=0.0, deadlines=deadlines)
    try:
        async with trio.open_nursery() as nursery:
            yield Flash(targets, Geometry(data_count, parity_count), nursery)
            nursery.cancel_scope.cancel()
    finally:
        await targets.aclose()
