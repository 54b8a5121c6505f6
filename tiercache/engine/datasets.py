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


async def build_datasets(config: Config, tally: Tally, nursery: trio.Nursery) -> list[Dataset]:
    """Raises SetupError, in one line, for the first source that cannot be used."""
    stores = [_cold(dataset, config.cold) for dataset in config.datasets]
    failures: list[SetupError] = []

    async def probe(store: S3Cold | Directory) -> None:
        try:
            await store.probe()
        except SetupError as error:
            failures.append(error)

    async with trio.open_nursery() as probing:
        for store in stores:
            probing.start_soon(probe, store)
    if failures:
        for store in stores:
            await store.aclose()
        raise failures[0]
    pairs = zip(config.datasets, stores, strict=True)
    return [_dataset(settings, config, store, tally, nursery) for settings, store in pairs]


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
    settings: DatasetSettings, config: Config, store: S3Cold | Directory, tally: Tally, nursery: trio.Nursery
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
    location = settings.location
    prefix = location.prefix if isinstance(location, S3Location) else ""
    replica = _replica(settings, prefix, tally, nursery)
    measured_replica = MeasuredTier(replica, tally.requested) if replica else None
    return Dataset(
        name=settings.name,
        cold=foreground,
        background=background,
        prefix=prefix,
        metadata_ttl_seconds=math.inf if settings.immutable else settings.metadata_ttl_seconds,
        immutable=settings.immutable,
        replica=measured_replica,
        source=settings.cold,
        replica_path=settings.replica,
        replica_holds=replica.holds if replica else None,
        cold_cost=measured.estimate.read_seconds,
        replica_cost=measured_replica.estimate.read_seconds if measured_replica else _free,
        trouble=lambda: pulse.trouble,
    )


def _free(_length: int) -> float:
    return 0.0


def _replica(settings: DatasetSettings, prefix: str, tally: Tally, nursery: trio.Nursery) -> Replica | None:
    if settings.replica is None:
        return None
    trust = settings.replica_trust
    return Replica(settings.replica, prefix, nursery=nursery, trust=trust, on_ignored=tally.replica_ignored)


def sources_of(config: Config) -> Sequence[tuple[str, str]]:
    """(what it is, path) of every directory that belongs to the user: no cache may lie in it or around it."""
    found = []
    for dataset in config.datasets:
        if isinstance(dataset.location, DirectoryLocation):
            found.append((f"source of {dataset.name}", dataset.location.path))
        if dataset.replica is not None:
            found.append((f"replica of {dataset.name}", dataset.replica))
    return found
