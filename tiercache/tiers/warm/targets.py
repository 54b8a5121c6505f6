"""The warm targets of a mount: opened, kept under observation, and put in order for an object.

Two orders. `ordered` is where manifests go and are looked for: rendezvous over all that are configured, by the weight in their
markers alone, so that every node computes the same whatever it sees of their health. `for_shards` is where new shards go: what is
up, writable and not full, preferring free space and avoiding what is much slower than the others; manifests say where they are.

A target that is not there when it is opened, or does not answer, is down with a notice, and joins when it does. Until then its
uuid and weight are those remembered; of one that was never seen nothing is known, and it has no place in the orders. Refused
are only directories that must not become targets.

What is remembered lies in the hot directory: path of a target -> uuid, weight, file system (see `marking.py`).
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import structlog
import trio

from tiercache.core.placement import rendezvous
from tiercache.errors import SetupError
from tiercache.mountinfo import mounts
from tiercache.tiers.place import refuse_overlap, refuse_storage, resolve
from tiercache.tiers.warm.marking import Foreign, Identity, load_memory, memory_key, save_memory
from tiercache.tiers.warm.target import Deadlines, Observe, Target

log = structlog.get_logger()

TICK_SECONDS = 0.5
MIN_FREE_RATIO = 0.1
SLOW_RATIO = 2.0  # times the median latency, from which on a target gets fewer shards
FAST_SECONDS = 0.005  # differences below that are noise

_ROLE = "warm target"
_OPTION = "--warm-target"


def _unobserved(target: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None) -> None:
    pass


class Targets:
    """`all` in the order of the configuration. `notices` are for the operator, as of the start; of them `sharing` last."""

    def __init__(self, targets: Sequence[Target], memory_path: Path, memory: dict[str, Identity], min_free_ratio: float) -> None:
        self.all = tuple(targets)
        self.notices: list[str] = []
        self.sharing: list[str] = []
        self._memory_path = memory_path
        self._memory = memory
        self._min_free_ratio = min_free_ratio
        self._saving = trio.Lock()

    @property
    def by_uuid(self) -> dict[bytes, Target]:
        known = [target for target in self.all if target.identity is not None]
        return {target.uuid: target for target in sorted(known, key=lambda target: target.state != "down")}

    def ordered(self, object_id: bytes) -> list[Target]:
        """All of known identity, whatever their state: where the manifests of the object belong, in this order."""
        known = self.by_uuid
        weights = {uuid: float(max(1, target.weight_bytes)) for uuid, target in known.items()}
        return [known[uuid] for uuid in rendezvous(object_id, weights)]

    def for_shards(self, object_id: bytes, count: int) -> list[Target]:
        """At most `count` different targets that can take a shard now, best first."""
        fit = {uuid: target for uuid, target in self.by_uuid.items() if self._takes_shards(target)}
        reads = _speed_ratios({uuid: target.latency_seconds for uuid, target in fit.items()})
        writes = _speed_ratios({uuid: target.create_estimate.latency_seconds for uuid, target in fit.items()})
        weights = {uuid: target.usage.free_bytes * min(reads[uuid], writes[uuid]) for uuid, target in fit.items()}
        return [fit[uuid] for uuid in rendezvous(object_id, weights)[:count]]

    def _takes_shards(self, target: Target) -> bool:
        return target.state == "up" and target.is_writable and not self.lacks_room(target)

    def lacks_room(self, target: Target) -> bool:
        """Is its file system as full as it may get?"""
        if target.state == "down":
            return False
        return target.is_full or target.usage.free_bytes < max(1, target.usage.total_bytes * self._min_free_ratio)

    async def silent(self, seconds: float) -> list[str]:
        """The paths of those that do not answer within so long."""
        found: list[str] = []

        async def ask(target: Target) -> None:
            if await target.is_silent(seconds):
                found.append(target.path)

        async with trio.open_nursery() as nursery:
            for target in self.all:
                nursery.start_soon(ask, target)
        return found

    async def run(self) -> None:
        """Probe them as each is due, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for target in self.all:
                    if target.probe_due():
                        nursery.start_soon(self.probe, target)
                await trio.sleep(TICK_SECONDS)

    async def probe(self, target: Target) -> None:
        """Find out how a target is, now. Raises nothing."""
        await target.probe(self._memory.get(memory_key(target.path)))
        twin = self._twin_of(target)
        if twin is not None:
            target.not_usable(f"is a copy of {twin.path}: both have the same uuid")
        await self._remember()

    async def aclose(self) -> None:
        for target in self.all:
            target.close()

    async def open(self) -> None:
        """The first look at all of them at once. Raises SetupError for one that must not become a target."""
        refusals: list[SetupError] = []

        async def first(target: Target) -> None:
            try:
                await target.open(self._memory.get(memory_key(target.path)))
            except Foreign as error:
                hint = f"choose an empty or new directory with {_OPTION}"
                refusals.append(SetupError(f"{_ROLE} {target.path} {error}", hint=hint))

        async with trio.open_nursery() as nursery:
            for target in self.all:
                nursery.start_soon(first, target)
        for target in self.all:
            twin = self._twin_of(target)
            if twin is not None and target.state != "down":
                message = f"{_ROLE}s {twin.path} and {target.path} have the same uuid"
                refusals.append(SetupError(message, hint="one is a copy of the other, or both are one directory: leave one out"))
        if refusals:
            raise refusals[0]
        await self._remember()
        self.sharing = self._notices_of_sharing()
        self.notices = [*self._notices_of_state(), *self.sharing]

    def _twin_of(self, target: Target) -> Target | None:
        """Another one, in use, of the same uuid."""
        if target.identity is None or target.state == "down":
            return None
        others = (other for other in self.all if other is not target and other.state != "down")
        return next((other for other in others if other.uuid == target.uuid), None)

    def _notices_of_state(self) -> list[str]:
        return [
            f"warm target {target.path} is {target.state}: {target.detail}; it is used as soon as it can be"
            for target in self.all
            if target.state != "up"
        ]

    def _notices_of_sharing(self) -> list[str]:
        sharing: defaultdict[str, list[str]] = defaultdict(list)
        for target in self.all:
            if target.identity is not None and target.state != "down":
                sharing[target.identity.filesystem].append(target.path)
        return [
            f"warm targets {', '.join(paths)} lie on one file system: they fail together, which parity does not cover"
            for paths in sharing.values()
            if len(paths) > 1
        ]

    async def _remember(self) -> None:
        async with self._saving:
            seen = {
                memory_key(target.path): target.identity
                for target in self.all
                if target.identity is not None and target.state != "down"
            }
            memory = self._memory | seen
            if memory == self._memory:
                return
            self._memory = memory
            try:
                await trio.to_thread.run_sync(save_memory, self._memory_path, memory)
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                log.warning("warm_targets_not_remembered", path=str(self._memory_path), error=reason)


async def open_targets(
    paths: Sequence[str],
    memory_path: Path,
    mountpoint: Path,
    others: Sequence[tuple[str, Path]] = (),
    *,
    observe: Observe = _unobserved,
    deadlines: Deadlines | None = None,
    min_free_ratio: float = MIN_FREE_RATIO,
    rng: random.Random | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Targets:
    """Takes no longer than one probe, however many hang. Raises SetupError.

    `others` are (what it is, where) of all that must lie neither inside nor around a target: hot directories, replicas,
    `file://` sources; the mount point is added.
    """
    await trio.to_thread.run_sync(_refuse_places, paths, [("mount point", mountpoint), *others])
    memory = await trio.to_thread.run_sync(load_memory, memory_path)
    made = [
        Target(
            path,
            identity=None,
            observe=observe,
            deadlines=deadlines if deadlines is not None else Deadlines(),
            rng=rng if rng is not None else random.Random(),
            clock=clock,
        )
        for path in paths
    ]
    targets = Targets(made, memory_path, memory, min_free_ratio)
    await targets.open()
    return targets


def _refuse_places(paths: Sequence[str], others: Sequence[tuple[str, Path]]) -> None:
    table = mounts()
    homes = [resolve(Path(path), table) for path in paths]
    apart = [(what, resolve(where, table)) for what, where in others]
    for position, home in enumerate(homes):
        for what, where in [*apart, *((_ROLE, other) for other in homes[:position])]:
            refuse_overlap(home, what, where, table, role=_ROLE, option=_OPTION)
        refuse_storage(home, table)


def _speed_ratios(latency_seconds: Mapping[bytes, float]) -> dict[bytes, float]:
    """1 for all that are not much slower than usual, and for what is not known yet (0.0)."""
    known = [max(each, FAST_SECONDS) for each in latency_seconds.values() if each > 0]
    slowest = SLOW_RATIO * median(known) if known else FAST_SECONDS
    return {uuid: 1.0 if each <= slowest else slowest / each for uuid, each in latency_seconds.items()}


async def all_at_once(jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Do them side by side, until the last has ended; none of them raises."""
    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(job)
