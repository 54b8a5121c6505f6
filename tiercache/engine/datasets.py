"""Datasets from the configuration: each cold store with its wrappers, checked before anything is mounted.

    Retrying( Limited( Measured( S3Cold | Directory )))

so that a retry that sleeps holds no slot, and every attempt is measured by itself. The background view shares the slots at lower
priority.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import trio

from tiercache.config import ColdSettings, Config, DatasetSettings
from tiercache.config.location import DirectoryLocation, S3Location
from tiercache.core.backoff import Backoff
from tiercache.engine.dataset import Dataset
from tiercache.errors import NotFound, SetupError, TierError, VersionChanged
from tiercache.metrics.tally import Tally
from tiercache.tiers.cold.dial import Timeouts
from tiercache.tiers.cold.directory import Directory
from tiercache.tiers.cold.endpoint import Endpoint
from tiercache.tiers.cold.s3 import S3Cold
from tiercache.tiers.limited import Limited
from tiercache.tiers.measured import Measured, MeasuredTier
from tiercache.tiers.retrying import Retrying
from tiercache.tiers.warm.replica import Replica

log = structlog.get_logger()

LOOK_SECONDS = 30.0
"""How often a replica is looked at: one that was not mounted yet is found, one that has gone is told of."""


@dataclass
class Pulse:
    """Whether a cold store answers. 'Not there' and 'changed' are answers."""

    tally: Tally
    trouble: str = ""

    def observe(
        self, tier: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None
    ) -> None:
        self.tally.requested(tier, operation, seconds, transferred_bytes, error)
        if error is None or issubclass(error, NotFound | VersionChanged):
            self.trouble = ""
        elif issubclass(error, TierError):
            self.trouble = f"the last {operation} failed ({error.__name__})"


async def build_datasets(config: Config, tally: Tally, nursery: trio.Nursery, *, known: bool = False) -> list[Dataset]:
    """Raises SetupError, in one line, for the first source that cannot be used.

    `known` sources are not tried out: a predecessor did, readers are waiting, and a store that is down now must not keep
    hot files from them.
    """
    stores = [_cold(dataset, config.cold) for dataset in config.datasets]
    failures: list[SetupError] = []
    holds: dict[str, bool] = {}

    async def probe(name: str, store: S3Cold | Directory) -> None:
        try:
            holds[name] = await store.probe()
        except SetupError as error:
            failures.append(error)

    async with trio.open_nursery() as probing:
        for dataset, store in zip(config.datasets, stores, strict=True):
            if not known:
                probing.start_soon(probe, dataset.name, store)
    if failures:
        for store in stores:
            await store.aclose()
        raise failures[0]
    built = []
    for settings, store in zip(config.datasets, stores, strict=True):
        replica = await _replica(settings, tally, nursery)
        holds_something = known or holds[settings.name]
        notice = "" if holds_something else f"source {settings.cold} held nothing when it was mounted: check the prefix"
        if notice:
            log.warning("source_is_empty", dataset=settings.name, source=settings.cold)
        built.append(_dataset(settings, config, store, replica, tally, notice))
    return built


def _cold(settings: DatasetSettings, cold: ColdSettings) -> S3Cold | Directory:
    match settings.location:
        case S3Location(bucket, prefix):
            endpoint = Endpoint(
                settings.endpoint_url,
                region=settings.region,
                profile=settings.profile,
                anonymous=settings.anonymous,
                requester_pays=settings.requester_pays,
            )
            return S3Cold(
                bucket,
                prefix,
                endpoint,
                dataset=settings.name,
                source_id=settings.id,
                timeouts=Timeouts(cold.connect_timeout_seconds, cold.read_timeout_seconds),
                threads=trio.CapacityLimiter(cold.concurrency),
            )
        case DirectoryLocation(path):
            limiter = trio.CapacityLimiter(cold.concurrency)
            return Directory(path, dataset=settings.name, source_id=settings.id, threads=limiter)


def _dataset(
    settings: DatasetSettings, config: Config, store: S3Cold | Directory, replica: Replica | None, tally: Tally, notice: str
) -> Dataset:
    pulse = Pulse(tally)
    measured = Measured(store, pulse.observe)
    limited = Limited(measured, config.cold.concurrency)
    policy = Backoff(deadline_seconds=config.cold.deadline_seconds)

    def retried(operation: str, error: TierError) -> None:
        tally.retried(store.name, operation)
        log.info("retrying", dataset=settings.name, operation=operation, error=error.line)

    foreground, background = (
        Retrying(view, policy, rng=random.Random(), on_retry=retried) for view in (limited, limited.background())
    )
    measured_replica = MeasuredTier(replica, tally.requested) if replica else None
    return Dataset(
        name=settings.name,
        cold=foreground,
        background=background,
        prefix=_prefix(settings),
        metadata_ttl_seconds=math.inf if settings.immutable else settings.metadata_ttl_seconds,
        immutable=settings.immutable,
        replica=measured_replica,
        source=settings.cold,
        replica_path=settings.replica,
        replica_holds=replica.holds if replica else None,
        cold_cost=measured.estimate.read_seconds,
        cold_usual=measured.estimate.usual_seconds,
        replica_cost=measured_replica.estimate.read_seconds if measured_replica else _free,
        trouble=lambda: pulse.trouble,
        notice=notice,
        replica_trouble=(lambda: replica.trouble) if replica else str,
    )


def _prefix(settings: DatasetSettings) -> str:
    location = settings.location
    return location.prefix if isinstance(location, S3Location) else ""


def _free(_length: int) -> float:
    return 0.0


async def _replica(settings: DatasetSettings, tally: Tally, nursery: trio.Nursery) -> Replica | None:
    if settings.replica is None:
        return None
    trust = settings.replica_trust
    replica = Replica(settings.replica, _prefix(settings), nursery=nursery, trust=trust, on_ignored=tally.replica_ignored)
    await _look(settings.name, replica)
    nursery.start_soon(_keep_looking, settings.name, replica)
    return replica


async def _look(dataset: str, replica: Replica) -> None:
    """Log it when a replica has gone or come."""
    before = replica.trouble
    await replica.look()
    if replica.trouble and replica.trouble != before:
        log.warning("replica_is_missing", dataset=dataset, replica=replica.path, trouble=replica.trouble)
    elif before and not replica.trouble:
        log.info("replica_is_there", dataset=dataset, replica=replica.path)


async def _keep_looking(dataset: str, replica: Replica) -> None:
    while True:
        await trio.sleep(LOOK_SECONDS)
        await _look(dataset, replica)


def sources_of(config: Config) -> Sequence[tuple[str, str]]:
    """(what it is, path) of every directory that belongs to the user: no cache may lie in it or around it."""
    found = []
    for dataset in config.datasets:
        if isinstance(dataset.location, DirectoryLocation):
            found.append((f"source of {dataset.name}", dataset.location.path))
        if dataset.replica is not None:
            found.append((f"replica of {dataset.name}", dataset.replica))
    return found
