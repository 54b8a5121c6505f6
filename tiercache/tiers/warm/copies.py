"""Where the copies of an object are: from its id alone, asking the targets.

The manifest of an object lies on m+1 targets, the first that could be reached in the rendezvous order when it was written.
Whoever asks the first m+1 that can be reached now meets at least one of them, as long as no more than m targets failed either
time: for if none of the m+1 asked were among those written to, the side that stops first in the order had passed over all m+1
of the other. So m+1 answers "no" are a no, a target that does not answer is replaced by the next in the order, and fewer
answers mean that nobody knows.

Positive answers are kept (manifests never change), bounded by their bytes; negative ones for a few seconds. An object in a pack
is found in the catalogues without asking anybody (`catalogue.py`). Repair may put a shard elsewhere than its manifest says; who
finds it there notes it in `Copy.moved`.

A copy of which too few pieces are left counts as none for `LOST_SECONDS`, so that another one is written. Who has no other to
read from tries it all the same: what a target has lost may have come back.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import trio

from tiercache.core.manifest import Manifest
from tiercache.core.record import ObjectId, ObjectRef
from tiercache.core.stripe import Generation, fan_out, parse_manifest_name
from tiercache.errors import Unavailable
from tiercache.tiers.warm.catalogue import Catalogues, read_manifest
from tiercache.tiers.warm.hedging import Ask, Hedging, Race
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets

KEPT_BYTES = 64 << 20
KEPT_OVERHEAD_BYTES = 2048  # of one manifest besides its raw bytes
ABSENT_SECONDS = 5.0
ABSENT_COUNT = 65_536
LOST_SECONDS = 600.0
LOST_COUNT = 65_536


class Copy(msgspec.Struct, frozen=True):
    """One copy that has an object: all of it, or (of a pack) the stripe `member_number`."""

    manifest: Manifest
    moved: dict[int, bytes]  # shard index -> uuid of the target where it was found, instead of where the manifest says
    member_number: int | None = None

    @property
    def generation(self) -> Generation:
        return self.manifest.generation

    def has(self, ref: ObjectRef) -> bool:
        """Is it that object? Of 80 bits in the catalogue several may be alike. Raises Damaged."""
        if self.member_number is None:
            return self.manifest.object_id == ref.object_id and self.manifest.size_bytes == ref.size_bytes
        if not self.member_number < self.manifest.stripes_count:
            return False
        member = self.manifest.members[self.member_number]
        return member.object_id == ref.object_id and member.size_bytes == ref.size_bytes

    def stripe_at(self, offset: int) -> tuple[int, int]:
        """The stripe that has this byte of the object, and where in the object it begins."""
        if self.member_number is not None:
            return self.member_number, 0
        number = offset // self.manifest.chunk_bytes
        return number, number * self.manifest.chunk_bytes

    def target_uuid(self, index: int) -> bytes | None:
        """Where the shard is believed to lie."""
        return self.moved.get(index, self.manifest.placed[index])


class Copies:
    """What is known of copies. Used on the event loop only. `parity_count`: m of the configured geometry."""

    def __init__(
        self,
        targets: Targets,
        catalogues: Catalogues,
        hedging: Hedging,
        parity_count: int,
        *,
        kept_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.catalogues = catalogues
        self._targets = targets
        self._hedging = hedging
        self._parity_count = parity_count
        self._clock = clock
        self._kept: OrderedDict[ObjectId, tuple[Copy, ...]] = OrderedDict()
        self._kept_limit_bytes = kept_bytes
        self._kept_bytes = 0
        self._absent: OrderedDict[ObjectId, float] = OrderedDict()
        self._lost: OrderedDict[tuple[ObjectId, Generation], float] = OrderedDict()
        self._looking: dict[ObjectId, trio.Event] = {}

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def known(self, object_id: ObjectId) -> bool:
        """Was a committed copy seen? No I/O."""
        if self._present(self._kept.get(object_id, ())):
            return True
        return bool(self.packs_of(object_id))

    def packs_of(self, object_id: ObjectId) -> set[tuple[ObjectId, Generation]]:
        """Packs that seem to have it, without those that count as lost. No I/O."""
        packs = ((pack_id, generation) for pack_id, generation, _ in self.catalogues.find(object_id))
        return {pack for pack in packs if not self.is_lost(*pack)}

    def lost(self, object_id: ObjectId, generation: Generation) -> None:
        """Every target was asked, and there are fewer than k pieces of some stripe. `object_id`: of an object or a pack."""
        self._lost[object_id, generation] = self._clock() + LOST_SECONDS
        self._lost.move_to_end((object_id, generation))
        if len(self._lost) > LOST_COUNT:
            self._lost.popitem(last=False)

    def found_again(self, object_id: ObjectId, generation: Generation) -> None:
        self._lost.pop((object_id, generation), None)

    def has_lost(self, object_id: ObjectId) -> bool:
        """Is there a copy that counts as none? As far as is known without I/O."""
        kept = self._kept.get(object_id, ())
        packs = self.catalogues.find(object_id)
        return len(self._present(kept)) < len(kept) or any(self.is_lost(pack_id, generation) for pack_id, generation, _ in packs)

    def is_lost(self, object_id: ObjectId, generation: Generation) -> bool:
        until = self._lost.get((object_id, generation))
        return until is not None and self._clock() < until

    def _present(self, copies: Iterable[Copy]) -> list[Copy]:
        return [copy for copy in copies if not self.is_lost(copy.manifest.object_id, copy.generation)]

    def _in_order(self, copies: Iterable[Copy], *, lost_too: bool) -> list[Copy]:
        if not lost_too:
            return self._present(copies)
        return sorted(copies, key=lambda copy: self.is_lost(copy.manifest.object_id, copy.generation))

    def add(self, manifest: Manifest) -> None:
        """A copy that was just written, or repaired."""
        self.found_again(manifest.object_id, manifest.generation)
        if manifest.is_pack:
            self.catalogues.add(manifest)
            for number in range(manifest.stripes_count):
                self._absent.pop(manifest.member_id(number), None)
        others = [copy for copy in self._kept.get(manifest.object_id, ()) if copy.generation != manifest.generation]
        self._keep(manifest.object_id, [*others, Copy(manifest, {})])

    def forget(self, object_id: ObjectId) -> None:
        """Ask the targets again next time. `object_id`: of an object or a pack."""
        self._absent.pop(object_id, None)
        self._drop(object_id)
        for pack_id, _, _ in self.catalogues.find(object_id):
            self._drop(pack_id)

    def forget_all(self) -> None:
        """Ask the targets about everything again, packs included."""
        self._kept.clear()
        self._kept_bytes = 0
        self._absent.clear()
        self._lost.clear()
        self.catalogues.clear()

    async def find(self, object_id: ObjectId, *, in_packs_only: bool = False, ask_all: bool = False) -> list[Copy]:
        """All copies known, smallest generation first. Raises Unavailable when too few targets answer to know of none.

        `in_packs_only`: an object of this size has no copy of its own; then nobody is asked. `ask_all`: not only until one target
        names a copy, for those that were found could not be read; and what counts as lost is found, too, last.
        """
        while True:
            if kept := self._in_order(self._kept.get(object_id, ()), lost_too=ask_all):
                self._kept.move_to_end(object_id)
                return kept
            if packed := await self._packed(object_id, lost_too=ask_all):
                return packed
            if not self.catalogues.is_loaded and await self.catalogues.first_look():
                continue
            if in_packs_only:
                return []
            absent_until = self._absent.get(object_id)
            if absent_until is not None and self._clock() < absent_until:
                return []
            if (event := self._looking.get(object_id)) is None:
                break
            await event.wait()
        event = self._looking[object_id] = trio.Event()
        try:
            return await self._look_up(object_id, ask_all)
        finally:
            del self._looking[object_id]
            event.set()

    async def exactly(self, object_id: ObjectId, generation: Generation, *, is_pack: bool) -> Copy | None:
        """This copy of an object or a pack; None when no target gives its manifest."""
        while True:
            for copy in self._kept.get(object_id, ()):
                if copy.generation == generation:
                    self._kept.move_to_end(object_id)
                    return copy
            if (event := self._looking.get(object_id)) is None:
                break
            await event.wait()
        event = self._looking[object_id] = trio.Event()
        try:
            return await self._read(object_id, generation, self._targets.ordered(object_id), is_pack=is_pack)
        finally:
            del self._looking[object_id]
            event.set()

    async def _packed(self, object_id: ObjectId, *, lost_too: bool) -> list[Copy]:
        found = []
        for pack_id, generation, number in self.catalogues.find(object_id):
            if self.is_lost(pack_id, generation) and not lost_too:
                continue
            copy = await self.exactly(pack_id, generation, is_pack=True)
            if copy is not None and number < copy.manifest.stripes_count and copy.manifest.member_id(number) == object_id:
                found.append(msgspec.structs.replace(copy, member_number=number))
        return self._in_order(found, lost_too=lost_too)

    async def _look_up(self, object_id: ObjectId, ask_all: bool) -> list[Copy]:
        order = self._targets.ordered(object_id)
        asks = [
            Ask(number, target, target.read_seconds(0), partial(self._generations, target, object_id))
            for number, target in enumerate(order)
        ]
        wanted_count = len(order) if ask_all else min(self._parity_count + 1, len(order))

        def is_over(race: Race[frozenset[Generation]]) -> bool:
            """Somebody has it, or enough say no and too few are silent to have it."""
            silent_count = len(race.out) + len(race.failures)
            says_no = len(race.answers) >= wanted_count and (not race.out or silent_count <= self._parity_count)
            return says_no or (not ask_all and any(race.answers.values()))

        race = await self._hedging.in_order(asks, wanted_count, is_over)
        generations = sorted(set().union(*race.answers.values()))
        first = [race.who[number] for number, answer in race.answers.items() if answer]
        ordered = [*first, *(target for target in order if target not in first)]
        found = []
        for generation in generations:
            if (copy := await self._read(object_id, generation, ordered, is_pack=False)) is not None:
                found.append(copy)
        if not found and not is_over(race):
            raise Unavailable(f"only {len(race.answers)} of {len(order)} warm targets answer")
        found = self._in_order(found, lost_too=ask_all)
        if not found:
            self._absent[object_id] = self._clock() + ABSENT_SECONDS
            self._absent.move_to_end(object_id)
            if len(self._absent) > ABSENT_COUNT:
                self._absent.popitem(last=False)
        return found

    async def _generations(self, target: Target, object_id: ObjectId) -> frozenset[Generation]:
        names = await target.names(f"manifests/{fan_out(object_id)}")
        prefix = object_id.hex()
        parsed = (parse_manifest_name(name) for name in names if name.startswith(prefix))
        return frozenset(copy[1] for copy in parsed if copy is not None)

    async def _read(self, object_id: ObjectId, generation: Generation, order: list[Target], *, is_pack: bool) -> Copy | None:
        """The manifest from whichever target gives a valid one."""
        asks = [
            Ask(0, target, target.read_seconds(64 << 10), partial(read_manifest, target, object_id, generation, is_pack=is_pack))
            for target in order
        ]
        race = await self._hedging.gather(asks, 1)
        if not race.answers:
            return None
        copy = Copy(race.answers[0], {})
        others = [kept for kept in self._kept.get(object_id, ()) if kept.generation != generation]
        self._keep(object_id, [*others, copy])
        return copy

    def _keep(self, object_id: ObjectId, copies: list[Copy]) -> None:
        self._absent.pop(object_id, None)
        self._drop(object_id)
        self._kept[object_id] = tuple(sorted(copies, key=lambda copy: copy.generation))
        self._kept_bytes += _weight(copies)
        while self._kept_bytes > self._kept_limit_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, object_id: ObjectId) -> None:
        if (copies := self._kept.pop(object_id, None)) is not None:
            self._kept_bytes -= _weight(copies)


def _weight(copies: list[Copy] | tuple[Copy, ...]) -> int:
    return sum(len(copy.manifest.raw) + KEPT_OVERHEAD_BYTES for copy in copies)
