"""Writing a copy: stripes are read, compressed and encoded ahead, and their pieces appended to k+m shard files at once.

A copy exists when its manifest does, so the order is: all pieces, footers, fsync, rename; then the manifests, to the first m+1
reachable targets of the order that every node computes. Whatever dies in between leaves drafts and shards that no manifest names,
which collection removes when they are old.

A target that fails on the way loses its shard, not the copy: with at least k shards the copy is written *degraded*, and
completed by repair. With fewer nothing is left behind that could be.

Memory is bounded by `Staging`, one budget of bytes for all copies under way: a batch takes what it, its frame and its pieces
occupy before its first byte is read, and gives it back when the pieces are with the targets. Who is slow holds up the writer,
never grows it.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import structlog
import trio

from tiercache.core.manifest import Manifest, ManifestDraft, Member
from tiercache.core.record import ObjectId, ObjectRef
from tiercache.core.stripe import (
    Generation,
    Geometry,
    encode_shard_footer,
    encode_shard_header,
    make_generation,
    manifest_path,
    shard_path,
)
from tiercache.errors import Damaged, TiercacheError, TierError, Unavailable
from tiercache.tiers.warm.codec import EncodedStripe, encode_stripe
from tiercache.tiers.warm.isal import ErasureCode
from tiercache.tiers.warm.target import Draft, Target
from tiercache.tiers.warm.targets import Targets, all_at_once

log = structlog.get_logger()

AHEAD = 4
"""Batches of one copy that are read and encoded while another one is appended."""
ENCODERS = max(1, min(4, (os.cpu_count() or 1)))

Chunk = bytes | memoryview
Calm = Callable[[], Awaitable[None]]


class Batch(NamedTuple):
    """A few stripes that are read, encoded and appended together: one chunk of an object, or some members of a pack.

    `load` gives their bytes; `digests` are the xxh3-64 that they must have. A member that cannot be loaded any more (None), or
    is not what it should be, is left out of the pack.
    """

    logical_bytes: int
    load: Callable[[], Awaitable[Sequence[Chunk | None]]]
    digests: Sequence[int]
    members: Sequence[Member] | None = None


class Written(NamedTuple):
    """`stored_bytes` lie on targets now, manifests included. `missing_count` shards are still to be made by repair."""

    manifest: Manifest
    stored_bytes: int
    missing_count: int


class Staging:
    """A budget of bytes, given in order of asking. One that asks for more than all of it gets all of it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free_bytes = limit_bytes
        self._waiting: deque[tuple[int, trio.Event]] = deque()

    @property
    def used_bytes(self) -> int:
        return self._limit_bytes - self._free_bytes

    async def take(self, wanted_bytes: int) -> int:
        """Wait for so much; how much it was, which is owed back."""
        granted_bytes = min(wanted_bytes, self._limit_bytes)
        if not self._waiting and granted_bytes <= self._free_bytes:
            self._free_bytes -= granted_bytes
            return granted_bytes
        turn = granted_bytes, trio.Event()
        self._waiting.append(turn)
        try:
            await turn[1].wait()
        except trio.Cancelled:
            if turn[1].is_set():
                self.give(granted_bytes)
            else:
                self._waiting.remove(turn)
                self.give(0)
            raise
        return granted_bytes

    def give(self, granted_bytes: int) -> None:
        self._free_bytes += granted_bytes
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            wanted_bytes, event = self._waiting.popleft()
            self._free_bytes -= wanted_bytes
            event.set()


class _Encoding:
    """A batch on its way from the hot tier to the shards."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.encoded = trio.Event()
        self.appended = trio.Event()
        self.stripes: list[EncodedStripe | None] = []
        self.error: TiercacheError | None = None


class ShardDraft:
    """One shard file while it is written. After its target's first failure, logged as `failure`, it takes nothing any more."""

    def __init__(self, target: Target, index: int, failure: str = "shard_not_written") -> None:
        self.target = target
        self.index = index
        self.draft: Draft | None = None
        self.is_failed = False
        self.is_committed = False
        self._failure = failure

    async def append(self, buffers: Sequence[Chunk | bytearray]) -> None:
        if self.is_failed:
            return
        try:
            if self.draft is None:
                self.draft = await self.target.begin()
            await self.draft.append(buffers)
        except TierError as error:
            await self._fail(error)

    async def commit(self, path: str) -> None:
        if self.is_failed or self.draft is None:
            return
        try:
            await self.draft.commit(path)
        except TierError as error:
            await self._fail(error)
        else:
            self.is_committed = True

    async def _fail(self, error: TierError) -> None:
        self.is_failed = True
        log.warning(self._failure, target=self.target.path, error=error.line)
        await self.abandon()

    async def abandon(self) -> None:
        draft, self.draft = self.draft, None
        if draft is not None:
            await draft.abandon()


class Writer:
    """Writes copies of one geometry.

    `calm` is awaited before each batch is read, and returns when readers leave room for it.
    """

    def __init__(
        self,
        targets: Targets,
        geometry: Geometry,
        *,
        zstd_level: int,
        staging: Staging,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.geometry = geometry
        self._targets = targets
        self._code = ErasureCode(geometry.data_count, geometry.parity_count)
        self._zstd_level = zstd_level
        self._staging = staging
        self._clock = clock
        self._rng = rng
        self._encoders = trio.CapacityLimiter(ENCODERS)

    async def write_object(
        self, ref: ObjectRef, source_id: str, chunk_bytes: int, batches: Sequence[Batch], calm: Calm
    ) -> Written:
        """A copy of an object, one batch a chunk. Raises Unavailable when too few targets take it, and what `load` raises.

        Damaged: a chunk's bytes do not have the digest that they should have; no copy is made of them.
        """
        draft = ManifestDraft.of_object(ref, source_id, self._generation(), self.geometry, chunk_bytes=chunk_bytes)
        return await self._write(draft, batches, calm)

    async def write_pack(self, batches: Sequence[Batch], calm: Calm, *, generation: Generation | None = None) -> Written:
        """A pack of the batches' members. Raises as `write_object` does; Damaged when there would be none in it.

        `generation`: of one that replaces another pack; otherwise it is the youngest.
        """
        identity = ObjectId(self._rng.randbytes(20))
        draft = ManifestDraft(identity, self._generation() if generation is None else generation, self.geometry)
        return await self._write(draft, batches, calm)

    def _generation(self) -> Generation:
        return make_generation(self._clock(), self._rng.getrandbits(20))

    async def _write(self, draft: ManifestDraft, batches: Sequence[Batch], calm: Calm) -> Written:
        chosen = self._targets.for_shards(draft.object_id, self.geometry.shards_count)
        self._refuse_few(len(chosen))
        shards = [ShardDraft(target, index) for index, target in enumerate(chosen)]
        try:
            await self._put_pieces(draft, shards, batches, calm)
            if draft.is_pack and not draft.stripes_count:
                raise Damaged("no member of the pack is in the hot tier any more as it was written there")
            await self._commit_shards(draft, shards)
            return await self._put_manifests(draft, shards)
        except BaseException:
            with trio.move_on_after(1.0, shield=True):
                await self._take_back(draft, shards)
            raise

    def _too_few(self, count: int) -> Unavailable | None:
        """What is wrong when so many shards can be written; None when a copy can be made of them."""
        if count >= self.geometry.data_count:
            return None
        return Unavailable(
            f"only {count} warm targets take shards, and a copy needs {self.geometry.data_count}",
            hint="`tiercache targets` says what is wrong with the others",
        )

    def _refuse_few(self, count: int) -> None:
        if error := self._too_few(count):
            raise error

    # -- pieces

    async def _put_pieces(self, draft: ManifestDraft, shards: list[ShardDraft], batches: Sequence[Batch], calm: Calm) -> None:
        header = partial(encode_shard_header, draft.object_id, draft.generation, self.geometry, is_pack=draft.is_pack)
        await all_at_once([partial(shard.append, [header(shard.index)]) for shard in shards])
        send, receive = trio.open_memory_channel[_Encoding](AHEAD)
        error: TiercacheError | None = None
        async with trio.open_nursery() as nursery, receive:
            nursery.start_soon(self._encode_all, batches, calm, send, nursery)
            async for encoding in receive:
                await encoding.encoded.wait()
                error = encoding.error
                if error is None:
                    await self._append(draft, shards, encoding)
                    error = self._too_few(sum(not shard.is_failed for shard in shards))
                encoding.appended.set()
                if error is not None:
                    nursery.cancel_scope.cancel()
                    break
        if error is not None:
            raise error

    async def _encode_all(
        self, batches: Sequence[Batch], calm: Calm, send: trio.MemorySendChannel[_Encoding], nursery: trio.Nursery
    ) -> None:
        """The budget is taken in the order of the batches: one that waits for it never waits for those behind it."""
        parity_ratio = self.geometry.parity_count / self.geometry.data_count
        async with send:
            for batch in batches:
                await calm()
                granted_bytes = await self._staging.take(int(batch.logical_bytes * (2 + parity_ratio)))
                encoding = _Encoding(batch)
                nursery.start_soon(self._encode, encoding, granted_bytes)
                await send.send(encoding)

    async def _encode(self, encoding: _Encoding, granted_bytes: int) -> None:
        """Read and encode one batch, and wait until it is appended."""
        batch = encoding.batch
        try:
            try:
                chunks = await batch.load()
                job = partial(_encode_batch, chunks, batch.digests, self._zstd_level, self._code)
                encoding.stripes = await trio.to_thread.run_sync(job, limiter=self._encoders)
                if batch.members is None and None in encoding.stripes:
                    encoding.error = Damaged("a chunk in the hot tier is not what was written there")
            except TiercacheError as error:
                encoding.error = error
            encoding.encoded.set()
            await encoding.appended.wait()
        finally:
            self._staging.give(granted_bytes)

    async def _append(self, draft: ManifestDraft, shards: list[ShardDraft], encoding: _Encoding) -> None:
        members = encoding.batch.members
        pieces: list[list[Chunk | bytearray]] = [[] for _ in shards]
        for number, encoded in enumerate(encoding.stripes):
            if encoded is None:
                continue
            draft.add(
                encoded.logical_bytes,
                encoded.frame_bytes,
                is_plain=encoded.is_plain,
                digest=encoded.digest,
                checksums=encoded.checksums,
                member=members[number] if members is not None else None,
            )
            for shard, each in zip(shards, pieces, strict=True):
                each.append(encoded.pieces[shard.index])
        encoding.stripes = []
        await all_at_once([partial(shard.append, each) for shard, each in zip(shards, pieces, strict=True)])

    # -- making a copy of them

    async def _commit_shards(self, draft: ManifestDraft, shards: list[ShardDraft]) -> None:
        stripes = list(draft.stripes())
        await all_at_once([partial(shard.append, [encode_shard_footer(stripes, shard.index)]) for shard in shards])
        paths = [shard_path(draft.object_id, draft.generation, shard.index) for shard in shards]
        await all_at_once([partial(shard.commit, path) for shard, path in zip(shards, paths, strict=True)])
        self._refuse_few(sum(shard.is_committed for shard in shards))

    async def _put_manifests(self, draft: ManifestDraft, shards: list[ShardDraft]) -> Written:
        placed: list[bytes | None] = [None] * self.geometry.shards_count
        for shard in shards:
            if shard.is_committed:
                placed[shard.index] = shard.target.uuid
        manifest = draft.finish(placed)
        count = await put_manifests(self._targets, manifest)
        if count <= self.geometry.parity_count:
            raise Unavailable(
                f"only {count} warm targets took a manifest, and a copy needs {self.geometry.parity_count + 1}",
                hint="`tiercache targets` says what is wrong with the others",
            )
        committed_count = self.geometry.shards_count - placed.count(None)
        stored_bytes = committed_count * manifest.shard_bytes() + count * len(manifest.encode())
        return Written(manifest, stored_bytes, placed.count(None))

    async def _take_back(self, draft: ManifestDraft, shards: list[ShardDraft]) -> None:
        """Remove what was written of a copy that will not be. Best effort: collection finds what is left.

        Manifests go first: one that is left alone would name shards that are gone.
        """
        path = manifest_path(draft.object_id, draft.generation, is_pack=draft.is_pack)
        ordered = [target for target in self._targets.ordered(draft.object_id) if target.state == "up"]
        await all_at_once([partial(_remove, target, path) for target in ordered])
        await all_at_once([shard.abandon for shard in shards])
        paths = [(shard, shard_path(draft.object_id, draft.generation, shard.index)) for shard in shards if shard.is_committed]
        await all_at_once([partial(_remove, shard.target, path) for shard, path in paths])


async def put_manifests(targets: Targets, manifest: Manifest) -> int:
    """Put the manifest on the first m+1 targets that take it, in the order that all nodes share; on how many it lies then."""
    wanted_count = manifest.geometry.parity_count + 1
    path = manifest_path(manifest.object_id, manifest.generation, is_pack=manifest.is_pack)
    waiting = deque(targets.ordered(manifest.object_id))
    written_count = 0

    async def put() -> None:
        nonlocal written_count
        while waiting:
            target = waiting.popleft()
            try:
                await target.put(path, manifest.encode())
            except TierError as error:
                log.warning("manifest_not_written", target=target.path, error=error.line)
            else:
                written_count += 1
                return

    await all_at_once([put] * min(wanted_count, len(waiting)))
    return written_count


async def remove_copy(targets: Targets, manifest: Manifest) -> None:
    """Take a copy back: manifests first, then shards, wherever they may lie. Best effort: collection finds what is left."""
    object_id, generation = manifest.object_id, manifest.generation
    path = manifest_path(object_id, generation, is_pack=manifest.is_pack)
    reachable = [target for target in targets.all if target.state != "down"]
    await all_at_once([partial(_remove, target, path) for target in reachable])
    paths = [shard_path(object_id, generation, index) for index in range(manifest.geometry.shards_count)]
    await all_at_once([partial(_remove, target, path) for path in paths for target in reachable])


async def _remove(target: Target, path: str) -> None:
    try:
        await target.remove(path)
    except TierError as error:
        log.info("left_for_collection", target=target.path, path=path, error=error.line)


def _encode_batch(
    chunks: Sequence[Chunk | None], digests: Sequence[int], zstd_level: int, code: ErasureCode
) -> list[EncodedStripe | None]:
    """Blocks. None for what is missing or has another digest than it should."""
    encoded = [None if chunk is None else encode_stripe(chunk, zstd_level, code) for chunk in chunks]
    return [each if each is not None and each.digest == digest else None for each, digest in zip(encoded, digests, strict=True)]
