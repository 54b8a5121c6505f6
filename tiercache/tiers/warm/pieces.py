"""Any k of the k+m pieces of a stripe, each verified against the manifest, from whichever targets give them first.

Asked are, in this order: targets that are up and answer as fast as the others do, then slower ones, then those that are
suspect; data pieces before parity pieces, because those need no computing. One that fails or is late is replaced by the next
(`hedging.py`). A shard that does not lie where it should is looked for on all other targets, but only when fewer than k are had
without it: a parity piece costs less.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation, Stripe, shard_path
from tiercache.errors import Damaged, NotHeld, TierError, Unavailable
from tiercache.tiers.warm.copies import Copy
from tiercache.tiers.warm.hedging import Ask, Hedging, Race
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets

Piece = bytes | bytearray | memoryview

SLOW_RATIO = 4.0
SLOW_SECONDS = 0.005  # differences below this are noise


class Wish(msgspec.Struct, frozen=True):
    """A copy in which something is missing or bad. `object_id`: of the object, or of the pack."""

    object_id: ObjectId
    generation: Generation
    is_pack: bool


class Observer(Protocol):
    """What happens in reads that did not go straight."""

    def degraded(self) -> None:
        """A stripe was reconstructed."""

    def hedged(self, count: int) -> None:
        """So many more pieces were asked for."""

    def damaged(self, kind: str) -> None:
        """`kind`: missing_shard, bad_piece, bad_manifest."""

    def wished(self, wish: Wish) -> None:
        """The copy needs repair."""


class Pieces:
    """Reads pieces of stripes. Used on the event loop only."""

    def __init__(self, targets: Targets, hedging: Hedging, observer: Observer) -> None:
        self._targets = targets
        self._hedging = hedging
        self._observer = observer

    async def some(self, copy: Copy, stripe: Stripe, indexes: Sequence[int]) -> Race[Piece]:
        """Just these pieces, as far as they come in time."""
        asks, _ = self._asks(copy, stripe, indexes)
        ahead = max((ask.deadline_seconds for ask in asks), default=0.0)
        race = await self._hedging.gather(asks, len(indexes), patience_seconds=ahead)
        self._judge(copy, race)
        return race

    async def enough(
        self,
        copy: Copy,
        stripe: Stripe,
        before: Race[Piece] | None = None,
        *,
        observe: Callable[[int, Piece], None] | None = None,
    ) -> dict[int, Piece]:
        """At least k of them, those that were had `before` included. Raises Unavailable, or NotHeld when no shard is anywhere.

        `observe` is told each as it comes.
        """
        data_count = copy.manifest.geometry.data_count
        have = before.answers if before is not None else {}
        failures = before.failures if before is not None else []
        done = have.keys() | {number for number, _, _ in failures}
        asks, unplaced = self._asks(copy, stripe, [i for i in range(copy.manifest.geometry.shards_count) if i not in done])
        race = await self._hedging.gather(asks, data_count, have=have, observe=observe)
        if race.hedges_count:
            self._observer.hedged(race.hedges_count)
        self._judge(copy, race)
        if len(race.answers) >= data_count:
            return race.answers
        failures = [*failures, *race.failures]
        lost = unplaced + [number for number, _, error in failures if _is_shards_fault(error)]
        elsewhere = [
            self._ask(copy, stripe, index, target)
            for index in lost
            for target in self._targets.all
            if target.uuid != copy.target_uuid(index) and target.state != "down"
        ]
        again = await self._hedging.gather(elsewhere, data_count, have=race.answers, observe=observe)
        for number, target in again.who.items():
            copy.moved[number] = target.uuid
        if len(again.answers) >= data_count:
            return again.answers
        raise _too_few(copy, len(again.answers), [*failures, *again.failures], len(again.out) + len(race.out))

    def wish(self, copy: Copy) -> None:
        manifest = copy.manifest
        self._observer.wished(Wish(manifest.object_id, manifest.generation, manifest.is_pack))

    def _asks(self, copy: Copy, stripe: Stripe, indexes: Sequence[int]) -> tuple[list[Ask[Piece]], list[int]]:
        """In order of preference, and the indexes of shards of which nobody knows where they are."""
        asks, unplaced = [], []
        known = self._targets.by_uuid
        for index in indexes:
            target = known.get(copy.target_uuid(index) or b"")
            if target is None:
                unplaced.append(index)
            else:
                asks.append(self._ask(copy, stripe, index, target))
        usual_seconds = statistics.median(ask.usual_seconds for ask in asks) if asks else 0.0
        slow_seconds = max(SLOW_RATIO * usual_seconds, usual_seconds + SLOW_SECONDS)
        data_count = copy.manifest.geometry.data_count

        def preference(ask: Ask[Piece]) -> tuple[int, bool, int]:
            return 2 * _standing(ask.target) + (ask.usual_seconds > slow_seconds), ask.number >= data_count, ask.number

        asks.sort(key=preference)
        return asks, unplaced

    def _ask(self, copy: Copy, stripe: Stripe, index: int, target: Target) -> Ask[Piece]:
        manifest = copy.manifest
        length = stripe.piece_bytes(manifest.geometry.data_count)
        path = shard_path(manifest.object_id, manifest.generation, index)
        call = partial(target.read, path, stripe.piece_offset, length, checksum=stripe.checksums[index])
        return Ask(index, target, target.read_seconds(length), call)

    def _judge(self, copy: Copy, race: Race[Piece]) -> None:
        """Missing and bad pieces are counted and wished to be repaired; a target that fails has its own health."""
        kinds = [
            "missing_shard" if isinstance(error, NotHeld) else "bad_piece"
            for _, _, error in race.failures
            if _is_shards_fault(error)
        ]
        for kind in kinds:
            self._observer.damaged(kind)
        if kinds or self._can_be_completed(copy):
            self.wish(copy)

    def _can_be_completed(self, copy: Copy) -> bool:
        """Was it written without some of its shards, and are there targets for all of them now?"""
        shards = range(copy.manifest.geometry.shards_count)
        if all(copy.target_uuid(index) is not None for index in shards):
            return False
        fit_count = sum(target.state == "up" and target.is_writable and not target.is_full for target in self._targets.all)
        return fit_count >= len(shards)


def _standing(target: Target) -> int:
    """0: it is read like any other, and so is one that only cannot be written."""
    if target.state == "up" or (target.state == "suspect" and not target.is_writable):
        return 0
    return 1 if target.state == "suspect" else 2


def _is_shards_fault(error: TierError) -> bool:
    return isinstance(error, NotHeld | Damaged)


def _too_few(copy: Copy, count: int, failures: list[tuple[int, Target, TierError]], late_count: int) -> TierError:
    what = f"only {count} of the {copy.manifest.geometry.data_count} pieces that are needed of {copy.manifest!r}"
    if count == 0 and late_count == 0 and all(isinstance(error, NotHeld) for _, _, error in failures):
        return NotHeld(what)
    hint = next((error.line for _, _, error in failures if not isinstance(error, NotHeld)), "see `tiercache targets`")
    return Unavailable(what, hint=hint)
