"""`Control`, answered from the engine: what an operator sees and may ask for, for the daemon of one mount."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tiercache import __version__
from tiercache.admin.messages import (
    DatasetStatus,
    HandingOver,
    HotDirectory,
    PinAnswer,
    PinProgress,
    PinRequest,
    Pins,
    PinStatus,
    ReadPath,
    Refreshed,
    Status,
    Tiers,
    TierState,
    TierStatus,
    Unpinned,
    Where,
)
from tiercache.admin.places import Places
from tiercache.admin.warm_answers import gauge_targets, warm_notices, warm_status
from tiercache.admin.work import EngineWork
from tiercache.core.pin import outermost
from tiercache.core.record import Inode, Kind, ObjectRef, Pin
from tiercache.engine.dataset import Dataset
from tiercache.engine.engine import Engine
from tiercache.engine.pinning import PinKey, key_of
from tiercache.engine.warm_controls import WarmControls, WarmFacts
from tiercache.errors import NotFound, TierError, UsageError
from tiercache.metrics.exporter import render
from tiercache.metrics.tally import Tally

MAX_PATHS = 10_000


@dataclass(frozen=True)
class Mounted:
    """What the daemon knows of itself. `forget_names` makes the kernel look names up again, `unmount` ends the mount.

    `hand_over` ends the daemon and not the mount; it returns the version of the successor.
    """

    mountpoint: str
    socket: str
    path: Callable[[], ReadPath]
    native_counts: Callable[[], Mapping[str, int] | None]
    hot_paths: Sequence[str]
    notices: Sequence[str]
    forget_names: Callable[[Iterable[tuple[Inode, bytes]]], None]
    unmount: Callable[[], Awaitable[None]]
    hand_over: Callable[[], Awaitable[str]]
    supervisor: Callable[[], Literal["keeper", "systemd"] | None]
    restarts_count: int
    stall_seconds: Callable[[], float | None]


class Answers:
    """`warm` None: there are no targets."""

    def __init__(self, engine: Engine, tally: Tally, mounted: Mounted, *, single: bool, warm: WarmControls | None = None) -> None:
        self._engine = engine
        self._tally = tally
        self._mounted = mounted
        self._warm = warm
        self._places = Places(engine, mounted.mountpoint, single=single)
        self.work = EngineWork(engine, self._places, warm)
        self._began = time.monotonic()

    # -- looking

    def status(self) -> Status:
        self._engine.reader.harvest()
        samples = self._tally.samples()
        warm = self._warm_facts()
        return Status(
            pid=os.getpid(),
            version=__version__,
            mountpoint=self._mounted.mountpoint,
            socket=self._mounted.socket,
            uptime_seconds=time.monotonic() - self._began,
            path=self._mounted.path(),
            tiers=Tiers(hot=self._hot_status(), warm=warm_status(self._engine.datasets, warm), cold=self._cold_status()),
            datasets=[self._dataset_status(dataset, samples) for dataset in self._engine.datasets],
            notices=[*self._mounted.notices, *self._dataset_notices(), *warm_notices(warm)],
            supervisor=self._mounted.supervisor(),
            restarts_count=self._mounted.restarts_count,
            stall_seconds=self._mounted.stall_seconds(),
        )

    def _hot_status(self) -> TierStatus:
        directories = []
        for position, ledger in enumerate(self._engine.room.ledgers):
            sick = self._engine.holdings.disks.is_sick(position)
            state: TierState = "down" if sick else "ok"
            detail = "its disk failed a moment ago; reads go past it" if sick else ""
            directories.append(
                HotDirectory(self._mounted.hot_paths[position], ledger.used_bytes, ledger.capacity_bytes, state, detail)
            )
        down_count = sum(directory.state == "down" for directory in directories)
        overall: TierState = "ok" if not down_count else "down" if down_count == len(directories) else "degraded"
        return TierStatus(
            used_bytes=sum(directory.used_bytes for directory in directories),
            capacity_bytes=sum(directory.capacity_bytes for directory in directories),
            state=overall,
            directories=directories,
        )

    def _warm_facts(self) -> WarmFacts | None:
        return None if self._warm is None else self._warm.facts()

    def _dataset_notices(self) -> Iterable[str]:
        for dataset in self._engine.datasets:
            if dataset.notice:
                yield dataset.notice
            if why := dataset.replica_trouble():
                yield f"replica {dataset.replica_path} {why}: all is read from the source until something is there"

    def _cold_status(self) -> TierStatus:
        failing = [f"{dataset.name}: {why}" for dataset in self._engine.datasets if (why := dataset.trouble())]
        if not failing:
            return TierStatus(0, None, "ok")
        state: TierState = "down" if len(failing) == len(self._engine.datasets) else "degraded"
        return TierStatus(0, None, state, "; ".join(failing))

    def _dataset_status(self, dataset: Dataset, samples: dict[tuple[str, tuple[str, ...]], float]) -> DatasetStatus:
        name = dataset.name

        def by_tier(metric: str) -> dict[str, int]:
            return {
                labels[1]: int(value)
                for (sample, labels), value in samples.items()
                if sample == metric and len(labels) == 2 and labels[0] == name
            }

        hits = samples.get(("tiercache_hits_total", (name,)), 0.0)
        misses = samples.get(("tiercache_misses_total", (name,)), 0.0)
        hot = self._engine.census.of(name)
        return DatasetStatus(
            name=name,
            source=dataset.source,
            replica=dataset.replica_path,
            immutable=dataset.immutable,
            hot_objects_count=hot.objects_count,
            hot_bytes=hot.held_bytes,
            hits_ratio=hits / (hits + misses) if hits + misses else None,
            opens_count=int(samples.get(("tiercache_opens_total", (name,)), 0)),
            reads=by_tier("tiercache_reads_total"),
            read_bytes=by_tier("tiercache_read_bytes_total"),
            unreachable_count=int(samples.get(("tiercache_unreachable_keys", (name,)), 0)),
            pinned_bytes=self._engine.pinning.pinned_bytes(name),
        )

    async def where(self, path: str) -> Where:
        entry = await self._places.entry(path)
        is_file = entry.kind is Kind.FILE
        hot = self._engine.facts.hot(entry) if is_file else None
        dataset = next(dataset for dataset in self._engine.datasets if dataset.name == entry.dataset)
        replica = is_file and dataset.replica_holds is not None and await dataset.replica_holds(entry.ref)
        warm = is_file and await self._is_warm(entry.ref)
        residency = []
        if hot is not None:
            residency = ["hot"] * hot.complete + ["replica"] * replica + ["warm"] * warm + ["cold"]
        pin = self._engine.pinning.covering(entry.dataset, entry.key)
        return Where(
            path=path,
            kind="file" if is_file else "directory",
            dataset=entry.dataset,
            key=entry.key,
            version=entry.version,
            size_bytes=entry.size_bytes,
            inode=entry.inode,
            residency=residency,
            hot_bytes=self._engine.facts.hot_bytes(entry) if is_file else 0,
            chunks_present=hot.chunks_present if hot else 0,
            chunks_total=hot.chunks_total if hot else 0,
            replica=replica,
            pin=self._pin_status(pin) if pin else None,
        )

    async def _is_warm(self, ref: ObjectRef) -> bool:
        """As far as the targets that answer can tell."""
        if self._warm is None:
            return False
        try:
            return await self._warm.holds(ref)
        except TierError:
            return False

    async def refresh(self, path: str) -> Refreshed:
        dataset, below = self._places.located(path)
        refreshed = await self._engine.namespace.refresh(dataset.name, below)
        self._mounted.forget_names(refreshed.stale)
        return Refreshed(path, refreshed.changed_count, refreshed.dropped_count)

    def metrics(self) -> bytes:
        metrics = self._tally.metrics
        for path, ledger in zip(self._mounted.hot_paths, self._engine.room.ledgers, strict=True):
            metrics.hot_used_bytes.labels(path).set(ledger.used_bytes)
            metrics.hot_capacity_bytes.labels(path).set(ledger.capacity_bytes)
        counts = self._mounted.native_counts()
        if counts is not None:
            for path in ("passthrough", "native", "python"):
                metrics.open_handles.labels(path).set(counts[path])
            metrics.published_files.set(counts["published"])
            metrics.backing_files.set(counts["backing"])
        metrics.hot_objects.set(self._engine.index.hot_count())
        if self._warm is not None:
            gauge_targets(metrics, self._warm.facts())
        metrics.pins.set(len(self._engine.pinning.pins()))
        metrics.pinned_bytes.set(self._engine.pinning.pinned_bytes())
        return render(metrics)

    # -- pins

    async def _pin_key(self, path: str) -> PinKey:
        """What pinning this path means: one key for a file, all below for a directory."""
        entry = await self._places.entry(path)
        return entry.dataset, entry.key, entry.kind is Kind.FILE

    async def pin(self, request: PinRequest) -> PinAnswer:
        if not 0 < len(request.paths) <= MAX_PATHS:
            raise UsageError(f"{len(request.paths)} paths to pin", hint=f"name 1 to {MAX_PATHS} at a time")
        now = int(time.time())
        expires = now + max(1, int(request.ttl_seconds)) if request.ttl_seconds is not None else 0
        keys = dict.fromkeys([await self._pin_key(path) for path in request.paths])
        wanted = [Pin(dataset, prefix, exact, request.owner, request.reason, now, expires, 0) for dataset, prefix, exact in keys]
        admission, sized = await self._engine.pinning.admit(outermost(wanted), self._engine.facts.hot_bytes)
        admitted = not admission.refusal
        if admitted and not request.dry_run:
            await self._engine.pinning.add(sized)
        return PinAnswer(
            admitted=admitted,
            refusal=admission.refusal,
            dry_run=request.dry_run,
            objects_count=admission.objects_count,
            wanted_bytes=admission.wanted_bytes,
            hot_bytes=admission.hot_bytes,
            pinned_bytes=admission.pinned_bytes,
            pinnable_bytes=admission.pinnable_bytes,
            pins=[self._pin_status(pin) for pin in sized] if admitted and not request.dry_run else [],
        )

    async def unpin(self, paths: Sequence[str]) -> Unpinned:
        removed, missing = [], []
        for path in paths:
            found = self._pinned_at(path)
            if found is None:
                missing.append(path)
            else:
                removed.append(found)
        statuses = [self._pin_status(pin) for pin in removed]
        await self._engine.pinning.remove([key_of(pin) for pin in removed])
        return Unpinned(statuses, missing)

    def _pinned_at(self, path: str) -> Pin | None:
        """The pin that exactly this path made; the object itself may be gone from the store."""
        dataset, below = self._places.located(path)
        key = dataset.prefix + below
        spellings = {key, f"{key}/"} if below else {dataset.prefix}
        pins = self._engine.pinning.pins()
        return next((pin for pin in pins if pin.dataset == dataset.name and pin.prefix in spellings), None)

    async def pin_progress(self, paths: Sequence[str]) -> PinProgress:
        found = []
        for path in paths:
            pin = self._pinned_at(path) or self._covering(path)
            if pin is None:
                raise NotFound(f"{path} is not pinned", hint="`tiercache pins` lists what is")
            found.append(self._engine.pinning.progress(key_of(pin)))
        return PinProgress(
            objects_count=sum(each.objects_count for each in found),
            hot_objects_count=sum(each.hot_objects_count for each in found),
            wanted_bytes=sum(each.wanted_bytes for each in found),
            hot_bytes=sum(each.hot_bytes for each in found),
            failed_count=sum(each.failed_count for each in found),
            last_error=next((each.last_error for each in reversed(found) if each.last_error), ""),
            done=all(each.done for each in found),
        )

    def _covering(self, path: str) -> Pin | None:
        dataset, below = self._places.located(path)
        return self._engine.pinning.covering(dataset.name, dataset.prefix + below)

    def pins(self) -> Pins:
        return Pins([self._pin_status(pin) for pin in self._engine.pinning.pins()])

    def _pin_status(self, pin: Pin) -> PinStatus:
        prefix = next((dataset.prefix for dataset in self._engine.datasets if dataset.name == pin.dataset), "")
        return PinStatus(
            path=f"{pin.dataset}/{pin.prefix.removeprefix(prefix)}",
            dataset=pin.dataset,
            prefix=pin.prefix,
            exact=pin.exact,
            owner=pin.owner,
            reason=pin.reason,
            created_seconds=pin.created_seconds,
            expires_seconds=pin.expires_seconds or None,
            wanted_bytes=pin.bytes_at_admission,
            hot_bytes=self._engine.pinning.hot_bytes(key_of(pin)),
        )

    async def stop(self) -> None:
        await self._mounted.unmount()

    async def hand_over(self) -> HandingOver:
        successor = await self._mounted.hand_over()
        return HandingOver(os.getpid(), self._mounted.mountpoint, __version__, successor)
