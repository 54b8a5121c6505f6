"""The warm tier, read: bytes of an object from k verified pieces of each stripe that they touch.

A read finds the object's copies (`copies.py`), takes the oldest that can be read, and goes through it stripe by stripe: k pieces
(`pieces.py`), joined and decompressed (or reconstructed) in a thread, compared with the digest of what was written and put into
the sink's place. Of a plain stripe only those pieces are read that the read touches, and nothing is joined; all of a large one
goes into the sink piece by piece (`delivery.py`). What a read needed in part is kept for a moment (`kept.py`), and two reads of
one stripe at once read it once.

Memory: a stripe takes its pieces and its bytes from one budget before the first piece is asked for, `WORKING_BYTES` for all
reads together, besides `KEPT_BYTES` and what late pieces occupy until they come (`hedging.py`).

A copy that cannot be read gives way to the next generation. When none can be read, what is known of the object is forgotten and
looked up once more, copies that count as lost included: those that were known may have been collected, and others written. When
packs are gone, the targets are asked which there are now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import trio
import xxhash

from tiercache.core.record import ObjectId, ObjectRef
from tiercache.core.stripe import Generation, Geometry, Stripe
from tiercache.errors import Damaged, NotHeld, TiercacheError, TierError, Unavailable
from tiercache.tiers.sink import put
from tiercache.tiers.tier import Sink
from tiercache.tiers.warm.codec import decode_stripe, verify_piece
from tiercache.tiers.warm.copies import Copies, Copy
from tiercache.tiers.warm.delivery import Delivery
from tiercache.tiers.warm.hedging import Race
from tiercache.tiers.warm.isal import ErasureCode
from tiercache.tiers.warm.kept import Kept, Key, Parts
from tiercache.tiers.warm.pieces import Observer, Piece, Pieces
from tiercache.tiers.warm.writing import Staging

T = TypeVar("T")

WORKING_BYTES = 40 << 20
"""Two stripes of 8 MiB. With more at once all of them are late, the first one most of all: the first byte of a file of 64 MiB
comes after 20 ms, its last after 82 (27 and 113 with 64 MiB)."""
KEPT_BYTES = 64 << 20
DELIVERED_FROM_BYTES = 1 << 20
"""A plain stripe of so much is handed on piece by piece, a compressed one by the thread that decompresses it. Of a smaller one
nobody is answered before its end."""
DECODERS_COUNT = 4
CODES_COUNT = 8


class Warm:
    """A `Tier` over warm copies. Used on the event loop only.

    Objects of up to `pack_threshold_bytes`, which is the same on all nodes, are in packs: the catalogues in memory know all of
    them.
    """

    def __init__(
        self,
        copies: Copies,
        pieces: Pieces,
        observer: Observer,
        *,
        pack_threshold_bytes: int = 0,
        working_bytes: int = WORKING_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.name = "warm"
        self._copies = copies
        self._pieces = pieces
        self._observer = observer
        self._pack_threshold_bytes = pack_threshold_bytes
        self._working = Staging(working_bytes)
        self._kept = Kept(kept_bytes)
        self._reading: dict[Key, trio.Event] = {}
        self._decoders = trio.CapacityLimiter(DECODERS_COUNT)
        self._codes = Codes()
        self._closed = False

    @property
    def working_bytes(self) -> int:
        """What reads under way have taken of their budget."""
        return self._working.used_bytes

    def lacks(self, ref: ObjectRef) -> bool:
        """Is there certainly no copy? No I/O, hence False when it would have to be asked for, or counts as lost."""
        is_known = ref.size_bytes <= self._pack_threshold_bytes and self._copies.catalogues.is_loaded
        return is_known and not self._copies.known(ref.object_id) and not self._copies.has_lost(ref.object_id)

    def has(self, ref: ObjectRef) -> bool:
        """Was a copy seen? No I/O."""
        return self._copies.known(ref.object_id)

    async def holds(self, ref: ObjectRef) -> bool:
        """Is there a copy? Whether enough of its pieces are there, only a read tells. Raises Unavailable."""
        return bool(await self._fitting(ref))

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        assert offset >= 0
        assert length > 0
        assert offset + length <= ref.size_bytes
        at_start = sink.received_bytes
        failure: TierError | None = None
        tried: set[tuple[ObjectId, Generation]] = set()
        for is_again in (False, True):
            copies = await self._fitting(ref, ask_all=is_again and failure is None)
            for copy in copies:
                name = (copy.manifest.object_id, copy.generation)
                if name in tried:
                    continue
                tried.add(name)
                done = sink.received_bytes - at_start
                try:
                    await self._read(copy, offset + done, length - done, sink)
                    self._copies.found_again(*name)
                    return
                except NotHeld:
                    continue
                except (Unavailable, Damaged) as error:
                    failure = failure or error
            packs = self._copies.packs_of(ref.object_id)
            if is_again or not (copies or packs or self._copies.has_lost(ref.object_id)):
                break
            if failure is not None and packs <= tried and all(copy.member_number is not None for copy in copies):
                break  # other packs would be known; their manifests are long
            self._copies.forget(ref.object_id)
            if failure is None and packs:
                await self._copies.catalogues.refresh()  # a pack that is gone may have been written anew
        raise failure or NotHeld(f"warm: no copy of {ref.key!r}")

    async def aclose(self) -> None:
        self._closed = True
        self._kept.clear()

    async def _fitting(self, ref: ObjectRef, *, ask_all: bool = False) -> list[Copy]:
        fitting = []
        in_packs_only = ref.size_bytes <= self._pack_threshold_bytes
        for copy in await self._copies.find(ref.object_id, in_packs_only=in_packs_only, ask_all=ask_all):
            try:
                if copy.has(ref):
                    fitting.append(copy)
            except Damaged:
                self._observer.damaged("bad_manifest")
                self._pieces.wish(copy)
        return fitting

    async def _read(self, copy: Copy, offset: int, length: int, sink: Sink) -> None:
        end = offset + length
        while offset < end:
            if self._closed:
                raise Unavailable("warm: closed")
            number, begin = copy.stripe_at(offset)
            stripe = copy.manifest.stripe(number)
            count = min(end, begin + stripe.logical_bytes) - offset
            if count <= 0:
                raise Damaged(f"{copy.manifest!r}: stripe {number} is too short")
            await self._read_stripe(copy, number, stripe, offset - begin, count, sink)
            offset += count

    async def _read_stripe(self, copy: Copy, number: int, stripe: Stripe, offset: int, length: int, sink: Sink) -> None:
        key = (copy.manifest.object_id, copy.generation, number)
        while (event := self._reading.get(key)) is not None:
            await event.wait()
        if (parts := self._kept.get(key)) is not None and (views := parts.cut(offset, length)) is not None:
            await self._deliver(sink, views, None)
            return
        event = self._reading[key] = trio.Event()
        size_bytes = stripe.frame_bytes + stripe.logical_bytes
        taken_bytes = 0
        try:
            taken_bytes = await self._working.take(size_bytes)
            if length == stripe.logical_bytes >= DELIVERED_FROM_BYTES:
                await (self._hand_on if stripe.is_plain else self._decode)(copy, stripe, sink)
                return
            parts = await self._fetch(copy, stripe, offset, length)
            if length < stripe.logical_bytes:
                self._kept.put(key, parts)
            del self._reading[key]
            event.set()
            views = parts.cut(offset, length)
            assert views is not None
            await self._deliver(sink, views, stripe.digest if length == stripe.logical_bytes else None)
        finally:
            self._working.give(taken_bytes)
            if self._reading.get(key) is event:
                del self._reading[key]
                event.set()

    async def _hand_on(self, copy: Copy, stripe: Stripe, sink: Sink) -> None:
        """All of a plain stripe into the sink, piece by piece."""
        delivery = Delivery(stripe, copy.manifest.geometry.data_count, sink, self._in_thread)
        failure: TiercacheError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gather, copy, stripe, delivery)
            try:
                await delivery.run()
            except TiercacheError as error:
                failure = error
                nursery.cancel_scope.cancel()
        if isinstance(failure, Damaged):
            self._pieces.wish(copy)
        if failure is not None:
            raise failure

    async def _decode(self, copy: Copy, stripe: Stripe, sink: Sink) -> None:
        """All of a compressed stripe into the sink, by the thread that decompresses it."""
        pieces = await self._enough(copy, stripe)
        code = self._codes.get(copy.manifest.geometry)
        place = sink.place(stripe.logical_bytes)
        try:
            await self._in_thread(lambda: put(place, [memoryview(decode_stripe(stripe, pieces, code))]))
        except Damaged:
            self._pieces.wish(copy)
            raise
        sink.landed(stripe.logical_bytes, stripe.digest)

    async def _enough(self, copy: Copy, stripe: Stripe) -> dict[int, Piece]:
        """The pieces of a stripe that has to be joined."""
        pieces = await self._pieces.enough(copy, stripe)
        if any(index not in pieces for index in range(copy.manifest.geometry.data_count)):
            self._observer.degraded()
        return pieces

    async def _gather(self, copy: Copy, stripe: Stripe, delivery: Delivery) -> None:
        try:
            pieces = await self._pieces.enough(copy, stripe, observe=delivery.offer)
            for index, piece in (await self._computed(copy, stripe, delivery.indexes, pieces)).items():
                delivery.offer(index, piece)
        except TierError as error:
            delivery.fail(error)

    async def _computed(self, copy: Copy, stripe: Stripe, wanted: Sequence[int], pieces: Mapping[int, Piece]) -> dict[int, Piece]:
        """Those of the wanted pieces that are not there. Raises Damaged."""
        missing = [index for index in wanted if index not in pieces]
        if not missing:
            return {}
        self._observer.degraded()
        code = self._codes.get(copy.manifest.geometry)
        return await self._in_thread(partial(_reconstructed, stripe, pieces, missing, code))

    async def _fetch(self, copy: Copy, stripe: Stripe, offset: int, length: int) -> Parts:
        """At least the parts that have these bytes."""
        try:
            if stripe.is_plain:
                return await self._fetch_plain(copy, stripe, offset, length)
            pieces = await self._enough(copy, stripe)
            code = self._codes.get(copy.manifest.geometry)
            data = await self._in_thread(partial(decode_stripe, stripe, pieces, code))
        except Damaged:
            self._pieces.wish(copy)
            raise
        parts = Parts(stripe.logical_bytes)
        parts.add(0, memoryview(data))
        return parts

    async def _fetch_plain(self, copy: Copy, stripe: Stripe, offset: int, length: int) -> Parts:
        geometry = copy.manifest.geometry
        parts = Parts(stripe.piece_bytes(geometry.data_count))
        touched = parts.touched(offset, length)
        some: Race[Piece] | None = None
        if len(touched) < geometry.data_count:
            some = await self._pieces.some(copy, stripe, touched)
            if len(some.answers) == len(touched):
                return await self._plain(parts, stripe, some.answers)
        pieces = await self._pieces.enough(copy, stripe, some)
        pieces = {**pieces, **await self._computed(copy, stripe, touched, pieces)}
        return await self._plain(parts, stripe, {index: pieces[index] for index in range(geometry.data_count) if index in pieces})

    async def _plain(self, parts: Parts, stripe: Stripe, pieces: dict[int, Piece]) -> Parts:
        for index in sorted(pieces):
            begin = index * parts.part_bytes
            parts.add(index, memoryview(pieces[index])[: max(0, stripe.logical_bytes - begin)])
        if parts.held_bytes == stripe.logical_bytes:
            await self._in_thread(partial(_check, parts, stripe.digest))
        return parts

    async def _deliver(self, sink: Sink, views: list[memoryview], digest: int | None) -> None:
        """`digest`: of all of the bytes, if they have just been compared with it."""
        length = sum(map(len, views))
        place = sink.place(length)
        await self._in_thread(partial(put, place, views))
        sink.landed(length, digest)

    async def _in_thread(self, job: Callable[[], T]) -> T:
        """Given up when cancelled: the pieces are the thread's own, and a sink that was closed refuses it."""
        return await trio.to_thread.run_sync(job, abandon_on_cancel=True, limiter=self._decoders)


class Codes:
    """Tables of the erasure codes that are in use: copies keep the geometry with which they were written."""

    def __init__(self) -> None:
        self._codes: dict[Geometry, ErasureCode] = {}

    def get(self, geometry: Geometry) -> ErasureCode:
        code = self._codes.get(geometry)
        if code is None:
            if len(self._codes) >= CODES_COUNT:
                self._codes.clear()
            code = self._codes[geometry] = ErasureCode(geometry.data_count, geometry.parity_count)
        return code


def _reconstructed(stripe: Stripe, pieces: Mapping[int, Piece], missing: Sequence[int], code: ErasureCode) -> dict[int, Piece]:
    """These pieces, computed from others. Blocks. Raises Damaged when they are not what was written."""
    computed = code.reconstruct(pieces, missing)
    for index, piece in computed.items():
        if not verify_piece(piece, stripe.checksums[index]):
            raise Damaged("warm: a piece that was computed is not what was written")
    return dict(computed)


def _check(parts: Parts, digest: int) -> None:
    """Is it what was written, with all pieces together? Blocks."""
    hashing = xxhash.xxh3_64()
    for index in sorted(parts.parts):
        hashing.update(parts.parts[index])
    if hashing.intdigest() != digest:
        raise Damaged("warm: a stripe's pieces are right, and their sum is not")
