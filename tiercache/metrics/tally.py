"""What the parts of the daemon report, turned into metrics.

The engine and the FUSE operations know small protocols (`Observer`, `Meter`), not Prometheus. Label children are kept, since
looking one up costs as much as counting.
"""

from __future__ import annotations

import errno
from functools import cache
from typing import Literal

from prometheus_client import Counter, Histogram

from tiercache.core.record import ObjectRef
from tiercache.errors import TiercacheError, TierError
from tiercache.metrics.definitions import Metrics

Demotion = Literal["written", "already", "pack", "failed", "skipped"]
"""written: by itself; already: a copy was there; pack: in a pack; skipped: held by a replica, or not worth keeping."""

RepairOutcome = Literal["repaired", "partial", "impossible", "failed"]
"""repaired: whole again; partial: readable, and still less redundant than it should be; impossible: too few pieces are left."""


class Tally:
    """Implements `engine.reader.Observer`, `fuse.operations.Meter` and the callbacks that the daemon hands out."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._counter = cache(_counter)
        self._histogram = cache(_histogram)

    # -- reads

    def opened(self, dataset: str, is_hit: bool) -> None:
        self._counter(self.metrics.opens, dataset).inc()
        self._counter(self.metrics.hits if is_hit else self.metrics.misses, dataset).inc()

    def read_done(self, dataset: str, tier: str, count: int, seconds: float) -> None:
        metrics = self.metrics
        self._counter(metrics.reads, dataset, tier).inc()
        self._counter(metrics.read_bytes, dataset, tier).inc(count)
        self._histogram(metrics.read_seconds, tier).observe(seconds)

    def streamed(self, dataset: str, reason: str, count: int) -> None:
        self._counter(self.metrics.streamed_bytes, dataset, reason).inc(count)

    def fetched_by_open(self, dataset: str, tier: str, count: int) -> None:
        """A file that was fetched whole before it was open, and whose reads nobody here will see."""
        self._counter(self.metrics.read_bytes, dataset, tier).inc(count)

    def opened_natively(self, dataset: str, count: int, opened_bytes: int, read_bytes: int) -> None:
        """Opens that were answered without the engine, all of them hits, and what the daemon's threads read for them."""
        if count:
            self._counter(self.metrics.opens, dataset).inc(count)
            self._counter(self.metrics.hits, dataset).inc(count)
            self._counter(self.metrics.native_opened_bytes, dataset).inc(opened_bytes)
        if read_bytes:
            self._counter(self.metrics.read_bytes, dataset, "hot").inc(read_bytes)

    def read_ahead(self, count: int) -> None:
        self.metrics.read_ahead_bytes.inc(count)

    def scrubbed(self, count: int) -> None:
        self.metrics.scrubbed_bytes.inc(count)

    def verify_failed(self, ref: ObjectRef) -> None:
        self.metrics.verify_failures.inc()

    # -- kernel requests

    def operation(self, name: str, seconds: float) -> None:
        self._histogram(self.metrics.operation_seconds, name).observe(seconds)

    def error(self, name: str, number: int) -> None:
        self._counter(self.metrics.errors, name, errno.errorcode.get(number, str(number))).inc()

    # -- tiers and fills

    def served(self, dataset: str, tier: str, count: int) -> None:
        self._counter(self.metrics.fill_bytes, dataset, tier).inc(count)

    def passed(self, dataset: str, tier: str, error: TiercacheError) -> None:
        """A tier above cold failed a read, which goes on below."""
        self.replica_ignored(type(error).__name__)

    def filled(self, tier: str) -> None:
        self._counter(self.metrics.fills, tier).inc()

    def fill_failed(self, tier: str, error: TiercacheError) -> None:
        self._counter(self.metrics.fill_failures, tier, type(error).__name__).inc()

    def requested(
        self, tier: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None
    ) -> None:
        self._counter(self.metrics.requests, tier, operation).inc()
        self._histogram(self.metrics.request_seconds, tier, operation).observe(seconds)
        if error is not None and issubclass(error, TierError):  # not the sink's errors, nor a reader that left
            self._counter(self.metrics.request_errors, tier, operation, error.__name__).inc()

    def retried(self, tier: str, operation: str) -> None:
        self._counter(self.metrics.retries, tier, operation).inc()

    def replica_ignored(self, reason: str) -> None:
        self._counter(self.metrics.replica_ignored, reason).inc()

    def evicted(self, _directory: int, count: int) -> None:
        self.metrics.evictions.inc()
        self.metrics.evicted_bytes.inc(count)

    def late(self, seconds: float) -> None:
        self.metrics.loop_delay_seconds.observe(seconds)

    def unreachable(self, dataset: str, count: int) -> None:
        self.metrics.unreachable_keys.labels(dataset).set(count)

    # -- the warm tier

    def demoted(self, outcome: Demotion, logical_bytes: int = 0, stored_bytes: int = 0) -> None:
        """What became of one object; its bytes, and what was written for them (of a pack: when it is written, with its last)."""
        self._counter(self.metrics.demotions, outcome).inc()
        self.metrics.demoted_bytes.inc(logical_bytes)
        self.metrics.demoted_stored_bytes.inc(stored_bytes)

    def warm_degraded(self) -> None:
        self.metrics.warm_degraded_reads.inc()

    def warm_hedged(self, count: int) -> None:
        self.metrics.warm_hedges.inc(count)

    def repaired(self, outcome: RepairOutcome) -> None:
        self._counter(self.metrics.warm_repairs, outcome).inc()

    def warm_scrubbed(self, count: int) -> None:
        self.metrics.warm_scrubbed_bytes.inc(count)

    def warm_damaged(self, kind: str, count: int = 1) -> None:
        self._counter(self.metrics.warm_damage, kind).inc(count)

    # -- for `status`

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """(metric, label values in declared order) -> value, of counters and gauges."""
        found = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                found[sample.name, tuple(sample.labels.values())] = sample.value
        return found


def _counter(counter: Counter, *labels: str) -> Counter:
    return counter.labels(*labels)


def _histogram(histogram: Histogram, *labels: str) -> Histogram:
    return histogram.labels(*labels)
