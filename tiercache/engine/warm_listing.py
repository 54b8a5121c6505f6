"""What lies on all targets for one of the 4,096 directories, side by side: manifests and shards by copy, and what is none of
ours.

Packs have one directory for all; it is listed anew when the list is older than `PACKS_SECONDS`, because a pack whose manifest
came after the list looks like one without.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import msgspec
import trio

from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation, fan_out, parse_manifest_name, parse_shard_name
from tiercache.errors import TierError
from tiercache.tiers.warm.files import MARKER, OURS, Found
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.targets import Targets, all_at_once

PACKS_SECONDS = 60.0

Name = tuple[ObjectId, Generation]


class OnTarget(msgspec.Struct, frozen=True):
    """A file of ours on one target. `index` is that of a shard, None for a manifest."""

    target: Target
    file: Found
    index: int | None = None


class Foreign(msgspec.Struct, frozen=True):
    """Something on a target that has no name of ours."""

    target: Target
    relative: str


class Bucket:
    """Files by the copy that their names say, whatever is in them. `unanswered`: targets that could not be asked."""

    def __init__(self) -> None:
        self.manifests: dict[Name, list[OnTarget]] = defaultdict(list)
        self.packs: dict[Name, list[OnTarget]] = defaultdict(list)
        self.shards: dict[Name, list[OnTarget]] = defaultdict(list)
        self.foreign: list[Foreign] = []
        self.unanswered: set[str] = set()

    @property
    def names(self) -> list[Name]:
        """Of copies, those of one object by generation."""
        return sorted(self.manifests.keys() | self.packs.keys() | self.shards.keys())


class Listing:
    """Looks at all targets. Used on the event loop only."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._packs: dict[str, list[OnTarget]] = {}
        self._packs_unanswered: set[str] = set()
        self._packs_foreign: list[Foreign] = []
        self._packs_until = 0.0

    async def buckets(self) -> list[str]:
        """Those that hold anything on some target."""
        await self._list_packs()
        found = set(self._packs)

        async def look(target: Target, directory: str) -> None:
            try:
                found.update(name for name in await target.names(directory) if _is_bucket(name))
            except TierError:
                return

        await all_at_once(partial(look, target, kind) for target in self._targets.all for kind in ("manifests", "shards"))
        return sorted(found)

    async def look(self, bucket: str) -> Bucket:
        """Manifests first: a copy that is made meanwhile then shows as young shards without one, not as a copy without shards."""
        found = Bucket()
        await all_at_once(partial(self._look_at_manifests, found, target, bucket) for target in self._targets.all)
        if trio.current_time() >= self._packs_until:
            await self._list_packs()
        for pack in self._packs.get(bucket, ()):
            name = parse_manifest_name(pack.file.name)
            assert name is not None
            found.packs[name].append(pack)
        found.unanswered |= self._packs_unanswered
        await all_at_once(partial(self._look_at_shards, found, target, bucket) for target in self._targets.all)
        return found

    async def foreign(self) -> list[Foreign]:
        """What else lies in the directories of targets, outside the 4,096."""
        await self._list_packs()
        found = list(self._packs_foreign)

        async def look(target: Target) -> None:
            try:
                found.extend(
                    Foreign(target, name) for name in await target.names("") if name not in OURS and not _is_marker(name)
                )
                for kind in ("manifests", "shards"):
                    found.extend(Foreign(target, f"{kind}/{name}") for name in await target.names(kind) if not _is_bucket(name))
            except TierError:
                return

        await all_at_once(partial(look, target) for target in self._targets.all)
        return found

    async def _look_at_shards(self, found: Bucket, target: Target, bucket: str) -> None:
        for entry in await _scanned(found, target, f"shards/{bucket}"):
            shard = parse_shard_name(entry.name)
            if shard is None or not entry.is_regular or fan_out(shard[0]) != bucket:
                found.foreign.append(Foreign(target, f"shards/{bucket}/{entry.name}"))
            else:
                found.shards[shard[:2]].append(OnTarget(target, entry, shard[2]))

    async def _look_at_manifests(self, found: Bucket, target: Target, bucket: str) -> None:
        for entry in await _scanned(found, target, f"manifests/{bucket}"):
            name = parse_manifest_name(entry.name)
            if name is None or not entry.is_regular or fan_out(name[0]) != bucket:
                found.foreign.append(Foreign(target, f"manifests/{bucket}/{entry.name}"))
            else:
                found.manifests[name].append(OnTarget(target, entry))

    async def _list_packs(self) -> None:
        packs: dict[str, list[OnTarget]] = defaultdict(list)
        unanswered: set[str] = set()
        foreign: list[Foreign] = []
        until = trio.current_time() + PACKS_SECONDS

        async def look(target: Target) -> None:
            try:
                entries = await target.scan("packs")
            except TierError:
                unanswered.add(target.path)
                return
            for entry in entries:
                name = parse_manifest_name(entry.name)
                if name is None or not entry.is_regular:
                    foreign.append(Foreign(target, f"packs/{entry.name}"))
                else:
                    packs[fan_out(name[0])].append(OnTarget(target, entry))

        await all_at_once(partial(look, target) for target in self._targets.all)
        self._packs, self._packs_unanswered, self._packs_foreign, self._packs_until = packs, unanswered, foreign, until


async def _scanned(found: Bucket, target: Target, relative: str) -> list[Found]:
    """What lies there; nothing when the target cannot be asked, which is noted."""
    try:
        return await target.scan(relative)
    except TierError:
        found.unanswered.add(target.path)
        return []


def _is_bucket(name: str) -> bool:
    return len(name) == 3 and all(digit in "0123456789abcdef" for digit in name)


def _is_marker(name: str) -> bool:
    return name == MARKER or name.startswith(f"{MARKER}.") or name == "lost+found"
