"""Which packs there are and what is in them, known without asking anybody: the catalogue segments of all targets, loaded bit by
bit.

The manifest of a pack is a catalogue segment: an object in a pack has no manifest of its own. Segments never change and all lie
in one directory, so loading is: list `packs/` on every target every few seconds, read names that are new, drop names that no
target has any more. What is loaded costs 16 bytes an object (`core/pack.py`); segments themselves are not kept.

A name is dropped only when every target could be asked: a target that is down may be the one that has it.
"""

from __future__ import annotations

from contextlib import suppress

import trio

from tiercache.core.manifest import Manifest, decode_manifest
from tiercache.core.pack import Catalogue
from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation, manifest_path, parse_manifest_name
from tiercache.errors import Damaged, TierError
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets

POLL_SECONDS = 5.0
FIRST_LOOK_SECONDS = 3.0
"""From the start on, in which readers wait for the packs to be known instead of asking the cold tier for what lies in them."""
LOADS_AT_ONCE = 4
LOAD_SECONDS = 15.0  # then another target is tried
MANIFEST_LIMIT_BYTES = 64 << 20
"""The manifest of an object of 7 TB at 8 MiB a chunk: a file that noise made long must not fill the memory."""
INLINE_BYTES = 1 << 20  # hashing 1 MiB takes 60 us, a change of thread and back 90

Segment = tuple[ObjectId, Generation]


class Catalogues:
    """Used on the event loop only. `is_loaded`: the targets were asked once, so that a negative answer means something."""

    def __init__(self, targets: Targets, *, poll_seconds: float = POLL_SECONDS) -> None:
        self.is_loaded = False
        self._targets = targets
        self._poll_seconds = poll_seconds
        self._catalogue = Catalogue()
        self._loaded: set[Segment] = set()
        self._bad: set[tuple[bytes, Segment]] = set()  # (target, segment) that could not be read: again when asked to refresh
        self._refreshing = trio.Lock()
        self._first_look = trio.Event()
        self._began_at: float | None = None

    @property
    def catalogue(self) -> Catalogue:
        return self._catalogue

    def find(self, object_id: ObjectId) -> list[tuple[ObjectId, Generation, int]]:
        """(pack, generation, member number) of each pack that seems to have it, smallest generation first. No I/O."""
        return self._catalogue.find(object_id)

    def add(self, manifest: Manifest) -> None:
        """A pack that was just written or read."""
        segment = (manifest.object_id, manifest.generation)
        if segment not in self._loaded:
            self._loaded.add(segment)
            self._catalogue.add(manifest)

    def drop(self, pack_id: ObjectId, generation: Generation) -> None:
        """A pack that is no more."""
        if (pack_id, generation) in self._loaded:
            self._loaded.discard((pack_id, generation))
            self._catalogue.drop(pack_id, generation)

    def clear(self) -> None:
        """Forget all packs, until the targets are asked again."""
        self.is_loaded = False
        self._first_look = trio.Event()
        self._catalogue = Catalogue()
        self._loaded.clear()
        self._bad.clear()

    async def first_look(self) -> bool:
        """Is it loaded? Waits for that during the first seconds of `run`, and never afterwards."""
        if self._began_at is not None and not self.is_loaded:
            with trio.move_on_at(self._began_at + FIRST_LOOK_SECONDS):
                await self._first_look.wait()
        return self.is_loaded

    async def run(self) -> None:
        self._began_at = trio.current_time()
        while True:
            await self._refresh()
            await trio.sleep(self._poll_seconds)

    async def refresh(self) -> None:
        """Look at all targets now, also at what could not be read before. Raises nothing: who fails is passed over."""
        self._bad.clear()
        await self._refresh()

    async def _refresh(self) -> None:
        async with self._refreshing:
            seen: dict[Segment, list[Target]] = {}
            failed: list[Target] = []
            loaded_before = set(self._loaded)
            async with trio.open_nursery() as nursery:
                for target in self._targets.all:
                    nursery.start_soon(self._list, target, seen, failed)
            new = [segment for segment in seen if segment not in self._loaded]
            limiter = trio.CapacityLimiter(LOADS_AT_ONCE)
            async with trio.open_nursery() as nursery:
                for segment in new:
                    await limiter.acquire_on_behalf_of(segment)
                    nursery.start_soon(self._load, segment, seen[segment], limiter)
            if not failed:
                for segment in loaded_before - seen.keys():
                    self.drop(*segment)
            if len(failed) < len(self._targets.all):
                self.is_loaded = True
                self._first_look.set()

    async def _list(self, target: Target, seen: dict[Segment, list[Target]], failed: list[Target]) -> None:
        try:
            names = await target.names("packs")
        except TierError:
            failed.append(target)
            return
        for name in names:
            segment = parse_manifest_name(name)
            if segment is not None and (target.uuid, segment) not in self._bad:
                seen.setdefault(segment, []).append(target)

    async def _load(self, segment: Segment, targets: list[Target], limiter: trio.CapacityLimiter) -> None:
        try:
            for target in targets:
                try:
                    with trio.move_on_after(LOAD_SECONDS):
                        self.add(await read_manifest(target, *segment, is_pack=True))
                        return
                except Damaged:
                    self._bad.add((target.uuid, segment))
                except TierError:
                    continue
        finally:
            limiter.release_on_behalf_of(segment)


async def read_manifest(target: Target, object_id: ObjectId, generation: Generation, *, is_pack: bool) -> Manifest:
    """Raises NotHeld, Unavailable, or Damaged for what is not the manifest of this copy."""
    raw = await target.read_whole(manifest_path(object_id, generation, is_pack=is_pack), MANIFEST_LIMIT_BYTES)
    manifest = await decoded(bytes(raw))
    if (manifest.object_id, manifest.generation, manifest.is_pack) != (object_id, generation, is_pack):
        raise Damaged(f"target {target.path}: the manifest of {object_id.hex()} is that of another copy")
    return manifest


async def read_from_any(targets: Targets, object_id: ObjectId, generation: Generation, *, is_pack: bool) -> Manifest | None:
    """The manifest from the first target that gives it, in the order in which they are laid down; None when none does."""
    for target in targets.ordered(object_id):
        with suppress(TierError):
            return await read_manifest(target, object_id, generation, is_pack=is_pack)
    return None


async def decoded(raw: bytes) -> Manifest:
    """In a thread where it is long: it is hashed. Raises Damaged."""
    if len(raw) <= INLINE_BYTES:
        return decode_manifest(raw)
    return await trio.to_thread.run_sync(decode_manifest, raw)
