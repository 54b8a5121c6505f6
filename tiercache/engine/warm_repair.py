"""Repair of warm copies: shards that are missing or bad are computed anew from k valid pieces of each stripe, and manifests put
back.

Never makes things worse. A shard is rebuilt completely, and every piece compared with the manifest, in a draft that is renamed
over the bad file at the end: who reads meanwhile sees the old file or the new one. It goes to the target of the bad file, else
to the one that the manifest names, else to the best that has no other shard of the copy; when there is none the copy stays less
redundant, and says so. Manifests come last and only when the copy still has one: a copy that was removed meanwhile does not
come back.

Several nodes may repair one copy at once. They write the same bytes: on one target one file replaces the other, on two there is
a duplicate, which scrub removes.

Reads wish for repair (`wish`), bounded, each copy once; what could not be made whole is not tried again for `RETRY_SECONDS`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import structlog
import trio
import xxhash

from tiercache.core.manifest import Manifest
from tiercache.core.stripe import Stripe, encode_shard_footer, manifest_path, shard_path
from tiercache.engine.warm_examining import Condition, Pace, examine, locate, runs, shard_header
from tiercache.errors import Damaged, NotHeld, TierError, Unavailable
from tiercache.metrics.tally import RepairOutcome
from tiercache.tiers.warm.catalogue import MANIFEST_LIMIT_BYTES, read_from_any
from tiercache.tiers.warm.copies import Copies
from tiercache.tiers.warm.isal import ErasureCode
from tiercache.tiers.warm.pieces import Piece, Wish
from tiercache.tiers.warm.shards import Codes
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets, all_at_once
from tiercache.tiers.warm.writing import ShardDraft, put_manifests

log = structlog.get_logger()

WORKERS_COUNT = 2
WISHES_COUNT = 4096
RATE_BYTES = 256 << 20  # a second, of all repairs together: readers come first
RETRY_SECONDS = 60.0
LOST_RETRY_SECONDS = 3600.0  # each try reads all of the copy, and what is lost comes back with a target at best

Outcome = Literal["whole", "repaired", "partial", "impossible", "failed"]
"""whole: nothing was wrong; partial: less redundant than it should be, and no target is there for more; impossible: fewer than k
pieces of some stripe are left."""


class Repairs:
    """`done` hears the outcome of each repair that was needed."""

    def __init__(
        self, targets: Targets, copies: Copies, done: Callable[[RepairOutcome], None], *, rate_bytes: int = RATE_BYTES
    ) -> None:
        self._targets = targets
        self._copies = copies
        self._done = done
        self._pace = Pace(rate_bytes)
        self._codes = Codes()
        self._wishes: OrderedDict[Wish, None] = OrderedDict()
        self._busy: set[Wish] = set()
        self._tried: OrderedDict[Wish, float] = OrderedDict()
        self._wake = trio.Event()

    @property
    def waiting_count(self) -> int:
        return len(self._wishes) + len(self._busy)

    def wish(self, wish: Wish) -> None:
        """Look at the copy when there is time for it. One wish too many is dropped: the next read or scrub has it again."""
        if wish in self._wishes or wish in self._busy or len(self._wishes) >= WISHES_COUNT:
            return
        if self._tried.get(wish, 0.0) > trio.current_time():
            return
        self._wishes[wish] = None
        self._wake.set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS_COUNT):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while not self._wishes:
                if self._wake.is_set():
                    self._wake = trio.Event()
                await self._wake.wait()
            wish, _ = self._wishes.popitem(last=False)
            self._busy.add(wish)
            wait_seconds = RETRY_SECONDS
            try:
                if await self.repair(wish) == "impossible":
                    wait_seconds = LOST_RETRY_SECONDS
            except TierError as error:
                log.info("not_repaired", copy=f"{wish.object_id.hex()}.{wish.generation:016x}", error=error.line)
            finally:
                self._busy.discard(wish)
                self._tried[wish] = trio.current_time() + wait_seconds
                if len(self._tried) > WISHES_COUNT:
                    self._tried.popitem(last=False)

    async def repair(self, wish: Wish) -> Outcome:
        """Examine the copy, and mend what is wrong with it. Raises NotHeld when there is no such copy (any more)."""
        copy = await self._copies.exactly(wish.object_id, wish.generation, is_pack=wish.is_pack)
        if copy is None:
            raise NotHeld("no target gives its manifest")
        files, unanswered = await locate(self._targets, wish.object_id, wish.generation)
        return await self.mend(await examine(copy.manifest, files, unanswered, self._pace))

    async def mend(self, condition: Condition) -> Outcome:
        """Rebuild what the copy lacks, as far as it can be done. Raises nothing of a target's."""
        try:
            outcome = await self._mend(condition)
        except TierError as error:
            log.info("not_repaired", copy=repr(condition.manifest), error=error.line)
            outcome = "failed"
        if outcome != "whole":
            self._done(outcome)
        return outcome

    async def _mend(self, condition: Condition) -> Outcome:
        manifest = condition.manifest
        if condition.is_lost:
            self._copies.lost(manifest.object_id, manifest.generation)
            return "impossible"
        self._copies.found_again(manifest.object_id, manifest.generation)
        wanting = [index for index in condition.wanting if not self._may_come_back(condition, index)]
        rebuilt = await self._rebuild(condition, self._places(condition, wanting))
        desired = manifest.moved(self._placed(condition, rebuilt))
        try:
            is_changed = await self._put_manifests(desired)
        except NotHeld:
            for index, target in rebuilt.items():
                await target.remove(shard_path(manifest.object_id, manifest.generation, index))
            raise
        for index, target in rebuilt.items():
            condition.mended(index, target)
        if rebuilt or is_changed:
            self._copies.add(desired)
        if not condition.is_whole:
            return "partial"
        return "repaired" if rebuilt or is_changed else "whole"

    # -- where shards go

    def _may_come_back(self, condition: Condition, index: int) -> bool:
        """Does its target only not answer just now?"""
        target = self._targets.by_uuid.get(condition.manifest.placed[index] or b"")
        return target is not None and target.path in condition.unanswered and target.state != "down"

    def _places(self, condition: Condition, wanting: Sequence[int]) -> dict[int, Target]:
        """The target for each shard that is to be rebuilt, as far as there are any."""
        manifest = condition.manifest
        known = self._targets.by_uuid
        shards = range(manifest.geometry.shards_count)
        taken = {target.path for index in shards if index not in wanting for target in condition.good(index)}
        spare = self._targets.for_shards(manifest.object_id, len(self._targets.all))
        places: dict[int, Target] = {}
        hinted = {index: known.get(manifest.placed[index] or b"") for index in wanting}
        choices: tuple[Callable[[int], Sequence[Target | None]], ...] = (
            condition.bad,
            lambda index: [hinted[index]],
            lambda _: spare,
        )
        for choice in choices:
            for index in wanting:
                if index in places:
                    continue
                fit = next((each for each in choice(index) if each and _takes(each) and each.path not in taken), None)
                if fit is not None:
                    places[index] = fit
                    taken.add(fit.path)
        return places

    def _placed(self, condition: Condition, rebuilt: Mapping[int, Target]) -> list[bytes | None]:
        placed: list[bytes | None] = []
        for index, hint in enumerate(condition.manifest.placed):
            holders = sorted(target.uuid for target in ([rebuilt[index]] if index in rebuilt else condition.good(index)))
            placed.append(hint if hint in holders or not holders else holders[0])
        return placed

    # -- shards

    async def _rebuild(self, condition: Condition, places: Mapping[int, Target]) -> dict[int, Target]:
        """Write these shards; those that could be. Raises Unavailable when pieces cannot be had any more."""
        if not places:
            return {}
        manifest = condition.manifest
        code = self._codes.get(manifest.geometry)
        shards = {index: ShardDraft(target, index, "shard_not_rebuilt") for index, target in places.items()}
        try:
            await all_at_once([partial(shard.append, [shard_header(manifest, index)]) for index, shard in shards.items()])
            number = 0
            for run in runs(manifest):
                batch = [await self._pieces(condition, number + at, stripe) for at, stripe in enumerate(run)]
                rebuilt = await trio.to_thread.run_sync(_computed, code, run, batch, list(shards))
                await all_at_once([partial(shard.append, rebuilt[index]) for index, shard in shards.items()])
                number += len(run)
                await self._pace(sum(len(piece) for pieces in batch for piece in pieces.values()))
            for index, shard in shards.items():
                footer = await trio.to_thread.run_sync(encode_shard_footer, manifest.stripes(), index)
                await shard.append([footer])
                await shard.commit(shard_path(manifest.object_id, manifest.generation, index))
        finally:
            with trio.CancelScope(shield=True):  # bounded by the targets themselves
                await all_at_once([shard.abandon for shard in shards.values()])
        return {index: shard.target for index, shard in shards.items() if shard.is_committed}

    async def _pieces(self, condition: Condition, number: int, stripe: Stripe) -> dict[int, Piece]:
        """k valid pieces of a stripe, read and verified now."""
        manifest = condition.manifest
        data_count = manifest.geometry.data_count
        length = stripe.piece_bytes(data_count)
        holders = condition.holders(number)
        pieces: dict[int, Piece] = {}

        async def read(index: int, target: Target) -> None:
            path = shard_path(manifest.object_id, manifest.generation, index)
            try:
                pieces[index] = await target.read(path, stripe.piece_offset, length, checksum=stripe.checksums[index])
            except TierError:
                return  # another one is taken

        while len(pieces) < data_count:
            batch: dict[int, Target] = {}
            while holders and len(pieces) + len(batch) < data_count:
                index, target = holders.pop(0)
                if index not in pieces:
                    batch.setdefault(index, target)
            if not batch:
                raise Unavailable(f"only {len(pieces)} valid pieces of stripe {number} of {manifest!r}")
            if length == 0:
                pieces.update(dict.fromkeys(batch, b""))
                continue
            await all_at_once([partial(read, index, target) for index, target in batch.items()])
        return pieces

    # -- manifests

    async def _put_manifests(self, manifest: Manifest) -> bool:
        """Have it on the first m+1 targets that can be written; was that needed? Raises NotHeld when the copy is no more."""
        path = manifest_path(manifest.object_id, manifest.generation, is_pack=manifest.is_pack)
        first = [target for target in self._targets.ordered(manifest.object_id) if _takes(target)]
        for target in first[: manifest.geometry.parity_count + 1]:
            try:
                if await target.read_whole(path, MANIFEST_LIMIT_BYTES) == manifest.raw:
                    continue
            except (NotHeld, Damaged):
                pass
            except TierError:
                continue
            if await read_from_any(self._targets, manifest.object_id, manifest.generation, is_pack=manifest.is_pack) is None:
                raise NotHeld("the copy was removed meanwhile")
            return await put_manifests(self._targets, manifest) > 0
        return False


def _takes(target: Target) -> bool:
    return target.state == "up" and target.is_writable and not target.is_full


def _computed(
    code: ErasureCode, run: Sequence[Stripe], batch: Sequence[Mapping[int, Piece]], wanted: Sequence[int]
) -> dict[int, list[Piece]]:
    """These shards' pieces of a run of stripes, as they were. Blocks. Raises Damaged when they are not what the manifest says."""
    rebuilt: dict[int, list[Piece]] = {index: [] for index in wanted}
    for stripe, pieces in zip(run, batch, strict=True):
        present = {index: pieces[index] for index in wanted if index in pieces}
        computed = code.reconstruct(pieces, [index for index in wanted if index not in present])
        for index in wanted:
            piece = present[index] if index in present else computed[index]
            if xxhash.xxh3_64_intdigest(piece) != stripe.checksums[index]:
                raise Damaged("a piece that was computed is not what was written")
            rebuilt[index].append(piece)
    return rebuilt
