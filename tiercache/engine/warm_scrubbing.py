"""Scrub of the warm tier: everything that lies on the targets is read at a bounded rate and compared with what was written.

A pass goes through the 4,096 directories in order, one copy at a time. What it finds, by kind:

    bad_piece, truncated, too_long, bad_header, bad_footer, missing_shard     of shard files
    bad_manifest, missing_manifest                                            of manifests (a copy should have m+1)
    lost            a copy of which some stripe has fewer than k valid pieces
    superseded      a further generation of an object: the oldest one that can be read counts
    overlapping     a pack of which some members, not all, are in older ones that can be read (`warm_packing.py`)
    duplicate       a shard on two targets, as repairs by two nodes leave it, or one of a target that came back
    unreferenced    shards that no manifest names, as writers leave them that died
    old_draft       the same, unfinished
    foreign         files whose names are none of ours

With `repair` damage is mended (`warm_repair.py`), and what is superfluous removed when it is older than `GRACE_SECONDS` by the
clock of the target that it lies on. Foreign files are reported, never touched, and a copy that existed nowhere else is never
removed. Nothing is removed from a directory that some target did not show: what is not needed is known only when everything was
seen.

Where a pass is, is noted after each directory in a cursor file, so that the next one goes on there when the daemon was stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
import trio

from tiercache.core.manifest import MANIFEST_HEADER_BYTES, UUID_BYTES, Manifest
from tiercache.core.stripe import manifest_path, shard_path
from tiercache.engine.progress import ScrubProgress
from tiercache.engine.warm_examining import Condition, Pace, ShardFile, examine
from tiercache.engine.warm_listing import Bucket, Listing, Name, OnTarget
from tiercache.engine.warm_packing import Overlaps, Repacking
from tiercache.engine.warm_repair import Repairs
from tiercache.errors import Damaged, NotHeld, TierError, Unavailable
from tiercache.tiers.warm.catalogue import read_manifest
from tiercache.tiers.warm.copies import Copies
from tiercache.tiers.warm.files import DRAFTS
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets
from tiercache.tiers.warm.writing import remove_copy

log = structlog.get_logger()

GRACE_SECONDS = 3600.0
CURSOR_SECONDS = 7 * 86400.0  # what was looked at before that is looked at again
LEAST_BYTES = 64 << 10
"""What a copy counts for besides its bytes: looking at a small one is work that those do not show."""

_COUNTED_AS = {"too_long": "bad_piece", "bad_header": "bad_piece", "bad_footer": "bad_piece"}  # in metrics


class Observer(Protocol):
    def scrubbed(self, read_bytes: int) -> None: ...

    def damaged(self, kind: str) -> None: ...


class Cursor(msgspec.Struct, frozen=True):
    """Where a pass is, and what it has found so far. `bucket` is the next one."""

    bucket: str
    repair: bool
    noted_seconds: float
    done_count: int
    done_bytes: int
    damaged_count: int
    repaired_count: int
    found: dict[str, int]
    lines: list[str]


class WarmScrub:
    """`scrub` is one pass. Passes of several nodes at once do not disturb each other."""

    def __init__(
        self,
        targets: Targets,
        copies: Copies,
        repairs: Repairs,
        repacking: Repacking,
        observer: Observer,
        cursor_path: Path,
        rate_bytes: int,
        *,
        grace_seconds: float = GRACE_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._targets = targets
        self._copies = copies
        self._repairs = repairs
        self._repacking = repacking
        self._observer = observer
        self._cursor_path = cursor_path
        self._rate_bytes = rate_bytes
        self._grace_seconds = grace_seconds
        self._wall_clock = wall_clock

    async def scrub(self, repair: bool, progress: ScrubProgress) -> None:
        """Look at everything, or go on where a pass with the same `repair` was interrupted. Raises nothing of a target's."""
        first = await self._resume(repair, progress)
        parts = (self._targets, self._copies, self._repairs, self._repacking, self._observer)
        work = _Pass(*parts, self._rate_bytes, repair, progress)
        await work.begin(self._grace_seconds)
        buckets = [bucket for bucket in await work.listing.buckets() if bucket >= first]
        if not first:
            await work.look_around()
        at_start = progress.done_count
        for number, bucket in enumerate(buckets, 1):
            await work.look_at(bucket)
            progress.total_count = at_start + (progress.done_count - at_start) * len(buckets) // number
            await self._note(bucket, repair, progress)
        await trio.to_thread.run_sync(_remove, self._cursor_path)
        progress.total_count = progress.done_count

    async def _resume(self, repair: bool, progress: ScrubProgress) -> str:
        """The bucket to begin with; what was found before it is taken over."""
        cursor = await trio.to_thread.run_sync(_load, self._cursor_path)
        if cursor is None or cursor.repair != repair or self._wall_clock() - cursor.noted_seconds > CURSOR_SECONDS:
            return ""
        progress.done_count, progress.done_bytes = cursor.done_count, cursor.done_bytes
        progress.damaged_count, progress.repaired_count = cursor.damaged_count, cursor.repaired_count
        progress.found = Counter(cursor.found)
        progress.lines = list(cursor.lines)
        return cursor.bucket

    async def _note(self, bucket: str, repair: bool, progress: ScrubProgress) -> None:
        cursor = Cursor(
            f"{int(bucket, 16) + 1:03x}",
            repair,
            self._wall_clock(),
            progress.done_count,
            progress.done_bytes,
            progress.damaged_count,
            progress.repaired_count,
            dict(progress.found),
            list(progress.lines),
        )
        await trio.to_thread.run_sync(_save, self._cursor_path, cursor)


class _Pass:
    """One pass under way."""

    def __init__(
        self,
        targets: Targets,
        copies: Copies,
        repairs: Repairs,
        repacking: Repacking,
        observer: Observer,
        rate_bytes: int,
        repair: bool,
        progress: ScrubProgress,
    ) -> None:
        self.listing = Listing(targets)
        self._targets = targets
        self._copies = copies
        self._repairs = repairs
        self._repacking = repacking
        self._observer = observer
        self._pace = Pace(rate_bytes)
        self._overlaps = Overlaps(targets, copies, self._pace)
        self._repair = repair
        self._progress = progress
        self._wrong_manifests = 0
        self._silent: set[str] = set()  # targets that did not answer at some time
        self._old_before: dict[str, float] = {}  # target -> time by its own clock; what is younger is left alone

    async def begin(self, grace_seconds: float) -> None:
        async with trio.open_nursery() as nursery:
            for target in self._targets.all:  # one that has come back need not wait for its next probe
                nursery.start_soon(self._targets.probe, target)
        for target in self._targets.all:
            try:
                self._old_before[target.path] = await target.now_seconds() - grace_seconds
            except TierError as error:
                self._failed(target.path, error)
        await self._copies.catalogues.refresh()

    # -- what was found

    async def _after_read(self, read_bytes: int) -> None:
        self._progress.done_bytes += read_bytes
        self._observer.scrubbed(read_bytes)
        await self._pace(read_bytes)

    def _say(self, kind: str, target: Target | None, relative: str) -> None:
        self._progress.found[kind] += 1
        self._progress.say(f"{kind}: {relative if target is None else os.path.join(target.path, relative)}")

    def _failed(self, path: str, error: TierError) -> None:
        """A target could not be asked: said once of each."""
        if path not in self._silent:
            self._silent.add(path)
            self._progress.failures.add(path, error)

    def _is_old(self, found: OnTarget) -> bool:
        """A target whose clock could not be read has only young files."""
        return found.file.mtime_seconds < self._old_before.get(found.target.path, 0.0)

    # -- outside the buckets

    async def look_around(self) -> None:
        """Foreign files and drafts."""
        for foreign in await self.listing.foreign():
            self._say("foreign", foreign.target, foreign.relative)
        for target in self._targets.all:
            try:
                drafts = await target.scan(DRAFTS)
                for entry in drafts:
                    if self._is_old(OnTarget(target, entry)):
                        relative = f"{DRAFTS}/{entry.name}"
                        self._say("old_draft", target, relative)
                        if self._repair and entry.is_regular:
                            await target.remove(relative)
            except TierError as error:
                self._failed(target.path, error)

    # -- one bucket

    async def look_at(self, bucket: str) -> None:
        found = await self.listing.look(bucket)
        for foreign in found.foreign:
            self._say("foreign", foreign.target, foreign.relative)
        for path in found.unanswered:
            self._failed(path, Unavailable(f"warm target {path} did not show all that it has"))
        keeper: Manifest | None = None
        for name in found.names:
            if keeper is not None and keeper.object_id != name[0]:
                keeper = None
            manifests = found.manifests.get(name, []) + found.packs.get(name, [])
            if not manifests:
                await self._look_at_unreferenced(found, name)
                continue
            self._progress.done_count += 1
            await self._pace(LEAST_BYTES)
            before = self._wrong_manifests
            manifest = await self._look_at_manifests(name, manifests, is_pack=name in found.packs)
            if manifest is None:
                continue
            superfluous = await self._overlaps.in_older(manifest) if manifest.is_pack else frozenset()
            is_superfluous = manifest.is_pack and len(superfluous) == manifest.stripes_count  # one without members, too
            if keeper is not None or is_superfluous:
                await self._look_at_superseded(found, manifest, manifests)
            elif await self._look_at_copy(found, manifest, manifests, manifests_are_right=self._wrong_manifests == before):
                keeper = manifest
                if superfluous and all(map(self._is_old, manifests)):
                    await self._look_at_overlapping(found, manifest, superfluous)

    async def _look_at_unreferenced(self, found: Bucket, name: Name) -> None:
        """Shards without a manifest. Whether there is one is asked again before they are removed."""
        old = [shard for shard in found.shards[name] if self._is_old(shard)]
        if not old or found.unanswered:
            return
        for shard in old:
            assert shard.index is not None
            self._say("unreferenced", shard.target, shard_path(*name, shard.index))
        if self._repair and len(old) == len(found.shards[name]) and not await self._has_manifest(name):
            for shard in old:
                assert shard.index is not None
                await self._remove(shard.target, shard_path(*name, shard.index))

    async def _has_manifest(self, name: Name) -> bool:
        """Is there a manifest, right or wrong, or a target that does not say?"""
        for target in self._targets.all:
            for is_pack in (False, True):
                try:
                    await read_manifest(target, *name, is_pack=is_pack)
                except NotHeld:
                    continue
                except TierError:
                    return True
                return True
        return False

    # -- manifests

    async def _look_at_manifests(self, name: Name, found: Sequence[OnTarget], *, is_pack: bool) -> Manifest | None:
        """The one that is right; None when there is none. All others are reported, and mended or removed."""
        valid: list[tuple[OnTarget, Manifest]] = []
        bad: list[OnTarget] = []
        silent_count = 0
        for each in found:
            try:
                valid.append((each, await read_manifest(each.target, *name, is_pack=is_pack)))
            except Damaged:
                bad.append(each)
            except NotHeld:
                continue  # removed meanwhile
            except TierError:
                silent_count += 1
        if not valid:
            for each in bad:
                self._report_manifest("bad_manifest", name, each.target, is_pack)
            self._progress.damaged_count += bool(bad)
            return None
        counts = Counter(_essence(manifest) for _, manifest in valid)
        essence = min(counts, key=lambda each: (-counts[each], each))
        bad += [each for each, manifest in valid if _essence(manifest) != essence]
        agreeing = [(each, manifest) for each, manifest in valid if _essence(manifest) == essence]
        agreeing.sort(key=lambda pair: pair[0].target.uuid)
        manifest = agreeing[0][1]
        wanted_count = min(manifest.geometry.parity_count + 1, len(self._targets.by_uuid))
        for each in bad:
            self._report_manifest("bad_manifest", name, each.target, is_pack)
        for _ in range(wanted_count - len(agreeing) - len(bad) - silent_count):
            self._report_manifest("missing_manifest", name, None, is_pack)
        if self._repair:
            for each in bad:
                await self._remove(each.target, manifest_path(*name, is_pack=is_pack))  # repair puts it where it belongs
        return manifest

    def _report_manifest(self, kind: str, name: Name, target: Target | None, is_pack: bool) -> None:
        self._wrong_manifests += 1
        self._say(kind, target, manifest_path(*name, is_pack=is_pack))
        self._observer.damaged(kind)

    # -- copies

    async def _look_at_superseded(self, found: Bucket, manifest: Manifest, manifests: Sequence[OnTarget]) -> None:
        if not all(map(self._is_old, manifests)):
            return
        self._say("superseded", None, manifest_path(manifest.object_id, manifest.generation, is_pack=manifest.is_pack))
        if self._repair and not found.unanswered and not manifest.is_sole:
            await self._remove_copy(manifest)

    async def _look_at_overlapping(self, found: Bucket, manifest: Manifest, superfluous: frozenset[int]) -> None:
        path = manifest_path(manifest.object_id, manifest.generation, is_pack=True)
        self._say("overlapping", None, path)
        if not self._repair or found.unanswered or manifest.is_sole:
            return
        try:
            await self._repacking.write_without(manifest, superfluous, self._pace)
        except TierError as error:
            self._progress.failures.add(path, error)
        else:
            await self._remove_copy(manifest)

    async def _look_at_copy(
        self, found: Bucket, manifest: Manifest, manifests: Sequence[OnTarget], *, manifests_are_right: bool
    ) -> bool:
        """Can it be read?"""
        name = (manifest.object_id, manifest.generation)
        files = []
        for each in found.shards.get(name, ()):
            assert each.index is not None
            if each.index < manifest.geometry.shards_count:
                files.append(ShardFile(each.index, each.target, each.file.size_bytes))
            else:
                self._say("foreign", each.target, shard_path(*name, each.index))
        try:
            condition = await examine(manifest, files, found.unanswered, self._after_read)
        except Damaged as error:
            self._progress.failures.add(manifest_path(*name, is_pack=manifest.is_pack), error)
            return False
        if condition.faults and not await self._has_manifest(name):
            return False  # removed while it was read
        for fault in condition.faults:
            self._say(fault.kind, fault.target, shard_path(*name, fault.index))
            self._observer.damaged(_COUNTED_AS.get(fault.kind, fault.kind))
        if condition.is_lost:
            self._say("lost", None, manifest_path(*name, is_pack=manifest.is_pack))
            self._copies.lost(*name)
            if self._repair and not manifest.is_sole and all(map(self._is_old, manifests)):
                await self._remove_copy(manifest)  # what is not there any more is not damaged
            else:
                self._progress.damaged_count += 1
            return False
        outcome = await self._repairs.mend(condition) if self._repair else None
        is_damaged = bool(condition.faults) or not manifests_are_right or outcome not in (None, "whole")
        self._progress.damaged_count += is_damaged
        self._progress.repaired_count += is_damaged and outcome in ("whole", "repaired")
        await self._look_at_duplicates(condition, found)
        return True

    async def _look_at_duplicates(self, condition: Condition, found: Bucket) -> None:
        """Of several good files of a shard the one that the manifest names stays, else that of the smallest uuid."""
        manifest = condition.manifest
        name = (manifest.object_id, manifest.generation)
        old = {(each.index, each.target.path) for each in found.shards.get(name, ()) if self._is_old(each)}
        for index, hint in enumerate(manifest.placed):
            good = sorted(condition.good(index), key=lambda target: (target.uuid != hint, target.uuid))
            for target in good[1:]:
                self._say("duplicate", target, shard_path(*name, index))
                if self._repair and not found.unanswered and (index, target.path) in old:
                    await self._remove(target, shard_path(*name, index))
            for target in condition.bad(index):
                if self._repair and good:
                    await self._remove(target, shard_path(*name, index))

    # -- removing

    async def _remove_copy(self, manifest: Manifest) -> None:
        await remove_copy(self._targets, manifest)
        if manifest.is_pack:
            self._copies.catalogues.drop(manifest.object_id, manifest.generation)
        self._copies.forget(manifest.object_id)

    async def _remove(self, target: Target, relative: str) -> None:
        try:
            await target.remove(relative)
        except TierError as error:
            self._progress.failures.add(os.path.join(target.path, relative), error)


def _essence(manifest: Manifest) -> bytes:
    """A manifest without what may differ in those of one copy: where shards are believed to lie, and its own checksum."""
    end = MANIFEST_HEADER_BYTES + UUID_BYTES * manifest.geometry.shards_count
    return manifest.raw[:MANIFEST_HEADER_BYTES] + manifest.raw[end:-8]


def _load(path: Path) -> Cursor | None:
    """None when there is none, or none that can be understood."""
    try:
        return msgspec.convert(json.loads(path.read_bytes()), Cursor)
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def _save(path: Path, cursor: Cursor) -> None:
    """A cursor that cannot be written costs a pass from the beginning."""
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_text(json.dumps(msgspec.to_builtins(cursor)))  # ASCII, whatever names of foreign files are in it
        draft.replace(path)
    except OSError as error:
        log.warning("scrub_cursor_not_written", path=str(path), error=os.strerror(error.errno or 0))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("scrub_cursor_not_removed", path=str(path), error=os.strerror(error.errno or 0))
