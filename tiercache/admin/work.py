"""`Work`, answered from the engine: jobs that evict, scrub and rebuild, and the targets of the warm tier."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from tiercache.admin.messages import (
    EvictRequest,
    Failure,
    JobStarted,
    JobStatus,
    ScrubRequest,
    TargetsAnswer,
    TargetStatus,
)
from tiercache.admin.places import Places
from tiercache.core.record import Kind
from tiercache.engine.engine import Engine
from tiercache.engine.evicting import Evicting, Prefix, Scope
from tiercache.engine.jobs import Job, Jobs
from tiercache.engine.progress import EvictProgress, RebuildProgress, ScrubProgress
from tiercache.engine.warm_controls import Demote, TargetFacts, WarmControls
from tiercache.errors import NotFound, TiercacheError, UsageError

EVICTION = "eviction"
SCRUB_HOT, SCRUB_WARM = "scrub of the hot tier", "scrub of the warm tier"
REBUILDING = "rebuilding of the index"


class EngineWork:
    """`warm` None: there is no warm tier."""

    def __init__(self, engine: Engine, places: Places, warm: WarmControls | None) -> None:
        self._engine = engine
        self._places = places
        self._warm = warm
        self._jobs = Jobs(engine.nursery)
        self._evicting = Evicting(engine.index, engine.holdings, places.path_of)

    def evict(self, request: EvictRequest) -> JobStarted:
        if not request.paths:
            raise UsageError("no paths to evict", hint="name files or directories")
        if request.to == "warm":
            demote: Demote | None = self._needed().demote
        else:
            demote = self._warm.demote if self._warm is not None and request.to is None else None
        terms = "\0".join([request.to or "", *request.paths])
        running = self._jobs.running(EVICTION, terms)
        if running is not None:
            return _started(running, joined=True)
        progress = EvictProgress()
        work = partial(self._evict, request.paths, demote, progress)
        return _started(self._jobs.start(EVICTION, work, progress.snapshot, terms=terms))

    def scrub(self, request: ScrubRequest) -> JobStarted:
        progress = ScrubProgress()
        if request.tier == "hot" or (request.tier is None and self._warm is None):
            kind, terms = SCRUB_HOT, ""
            work: Callable[[], Awaitable[None]] = partial(self._engine.scrub.pass_over, progress, self._places.path_of)
        else:
            kind, terms = SCRUB_WARM, "with --repair" if request.repair else "without --repair"
            work = partial(self._needed().scrub, request.repair, progress)
        running = self._jobs.join(kind, terms=terms)
        if running is not None:
            return _started(running, joined=True)
        return _started(self._jobs.start(kind, work, progress.snapshot, terms=terms))

    def rebuild_index(self) -> JobStarted:
        rebuild = self._needed().rebuild
        running = self._jobs.join(REBUILDING)
        if running is not None:
            return _started(running, joined=True)
        progress = RebuildProgress()
        return _started(self._jobs.start(REBUILDING, partial(rebuild, progress), progress.snapshot))

    def job(self, number: int) -> JobStatus:
        job = self._jobs.find(number)
        now = job.show()
        return JobStatus(
            job=job.number,
            kind=job.kind,
            state=job.state,
            total_count=now.total_count,
            done_count=now.done_count,
            total_bytes=now.total_bytes,
            done_bytes=now.done_bytes,
            counts=dict(now.counts),
            failed_count=now.failed_count,
            failures=[Failure(path, type(error).__name__, str(error), error.hint) for path, error in now.failures],
            lines=list(now.lines),
            damaged_count=now.damaged_count,
            repaired_count=now.repaired_count,
            error="" if job.error is None else str(job.error),
            hint="" if job.error is None else job.error.hint,
        )

    def targets(self) -> TargetsAnswer:
        if self._warm is None:
            return TargetsAnswer(0, 0, [])
        facts = self._warm.facts()
        return TargetsAnswer(facts.data_shards, facts.parity_shards, [_target(target) for target in facts.targets])

    def _needed(self) -> WarmControls:
        if self._warm is None:
            raise UsageError(
                "this mount has no warm tier",
                hint="mount with --warm-target, or name targets in the configuration file",
            )
        return self._warm

    async def _evict(self, paths: list[str], demote: Demote | None, progress: EvictProgress) -> None:
        scope, unsure = await self._scope(paths, progress)
        ids, found = await self._evicting.find(scope, progress)
        for path, (error, meanings) in unsure.items():
            if not meanings & found:
                progress.failures.add(path, error)
        if demote is None:
            await self._evicting.drop(ids, progress)
        else:
            await self._evicting.demote(ids, demote, progress)

    async def _scope(
        self, paths: list[str], progress: EvictProgress
    ) -> tuple[Scope, dict[str, tuple[TiercacheError, set[Prefix]]]]:
        """What the paths mean. While the store does not say what a path is, it means the file as well as the directory."""
        scope = Scope()
        unsure: dict[str, tuple[TiercacheError, set[Prefix]]] = {}
        for path in dict.fromkeys(paths):
            try:
                entry = await self._places.entry(path)
            except (NotFound, UsageError) as error:
                progress.failures.add(path, error)
            except TiercacheError as error:
                dataset, below = self._places.located(path)
                key = dataset.prefix + below
                inside = {(dataset.name, f"{key}/" if below else key)}
                exactly = {(dataset.name, key)} if below else set()
                scope.prefixes |= inside
                scope.keys |= exactly
                unsure[path] = (error, inside | exactly)
            else:
                if entry.kind is Kind.FILE:
                    scope.objects.add(entry.object_id)
                else:
                    scope.prefixes.add((entry.dataset, entry.key))
        return scope, unsure


def _started(job: Job, *, joined: bool = False) -> JobStarted:
    return JobStarted(job.number, job.kind, joined)


def _target(target: TargetFacts) -> TargetStatus:
    return TargetStatus(
        target.path,
        target.uuid,
        target.state,
        target.detail,
        target.used_bytes,
        target.free_bytes,
        target.total_bytes,
        target.errors_count,
        target.is_full,
        target.is_writable,
    )
