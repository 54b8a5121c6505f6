"""Every metric, declared once: name, kind, unit, help, labels, stability.

`Metrics` builds the prometheus_client objects from these declarations on a registry of its own (several
daemons in one test process do not meet), one typed attribute each. `docs/metrics.md` has the same
table; a test compares the two both ways.

Names follow the Prometheus rules: prefix `tiercache_`, base units (seconds, bytes) as suffix, `_total`
for counters. Labels are bounded by construction: datasets, directories and tiers come from the
configuration, errors are class names of `tiercache/errors.py`, operations are methods. Never a key, a path or a user.

Measured: `inc` costs 0.3 us, `observe` 0.6 us, `labels` 0.9 us. So code on the path of a read keeps the
child that `labels` returned instead of asking for it again.

Stability: `stable` names and meanings outlive a minor version; `experimental` ones may change.
"""

from __future__ import annotations

import enum
import platform
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tiercache import __version__

# Hot reads take 10 us to 1 ms, replicas and first bytes from a store 1 to 100 ms, an exhausted deadline 30 s.
# About three a decade: with 20 tier/operation pairs a finer grid would triple the page.
SECONDS_BUCKETS = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3,
    25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Stability(enum.Enum):
    STABLE = "stable"
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True)
class Definition:
    """`attribute` is the name of the attribute of `Metrics`; `unit` is '' for plain counts."""

    attribute: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    stability: Stability = Stability.STABLE

    @property
    def name(self) -> str:
        """As Prometheus shows it: `tiercache_read_bytes_total`."""
        return f"tiercache_{self.attribute}" + ("_total" if self.kind is Kind.COUNTER else "")


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_EXPERIMENTAL = Stability.EXPERIMENTAL

DEFINITIONS: tuple[Definition, ...] = (
    # what users ask for
    Definition("opens", _C, "", "Files opened", ("dataset",)),
    Definition("reads", _C, "", "Reads answered, by the tier that the last missing byte came from", ("dataset", "tier")),
    Definition("read_bytes", _C, "bytes", "Bytes given to readers, by the tier that they came from", ("dataset", "tier")),
    Definition(
        "read_seconds", _H, "seconds", "Time to answer a read, by the tier that the last missing byte came from", ("tier",)
    ),
    Definition("operation_seconds", _H, "seconds", "Time to answer a request of the kernel", ("operation",)),
    Definition("errors", _C, "", "Requests of the kernel answered with an error", ("operation", "errno")),
    Definition("hits", _C, "", "Opens of files that were whole in the hot tier", ("dataset",)),
    Definition("native_opened_bytes", _C, "bytes", "Sizes of the files that were opened without Python", ("dataset",)),
    Definition("misses", _C, "", "Opens of files of which the hot tier lacked something", ("dataset",)),
    Definition("unreachable_keys", _G, "", "Keys known that no POSIX path can name", ("dataset",)),
    # filling and the hot tier
    Definition("fills", _C, "", "Chunks committed to the hot tier, by the tier that they came from", ("tier",)),
    Definition(
        "fill_bytes",
        _C,
        "bytes",
        "Bytes fetched from below the hot tier, kept or not, by the tier that they came from",
        ("dataset", "tier"),
    ),
    Definition("fill_failures", _C, "", "Chunk fills that were given up", ("tier", "error")),
    Definition(
        "streamed_bytes",
        _C,
        "bytes",
        "Bytes given to readers past the hot tier (reason: full, sick, admission)",
        ("dataset", "reason"),
    ),
    Definition(
        "read_ahead_bytes",
        _C,
        "bytes",
        "Bytes fetched ahead of a sequential reader, or of who opens a directory's small files in order",
        (),
        _EXPERIMENTAL,
    ),
    Definition("evictions", _C, "", "Objects removed from the hot tier to make room"),
    Definition("evicted_bytes", _C, "bytes", "Bytes freed by evictions"),
    Definition("hot_used_bytes", _G, "bytes", "Space of the hot tier in use or reserved", ("directory",)),
    Definition("hot_capacity_bytes", _G, "bytes", "Space that the hot tier may use", ("directory",)),
    Definition("open_handles", _G, "", "Open files by who serves their reads: passthrough, native, python", ("path",)),
    Definition("published_files", _G, "", "Hot files that are opened without Python"),
    Definition("backing_files", _G, "", "Hot files that the kernel holds open for passthrough"),
    Definition("hot_objects", _G, "", "Objects with bytes in the hot tier"),
    Definition("verify_failures", _C, "", "Chunks in the hot tier whose bytes did not match their checksum"),
    Definition("scrubbed_bytes", _C, "bytes", "Bytes of the hot tier hashed in the background"),
    Definition("pins", _G, "", "Pins in force"),
    Definition("pinned_bytes", _G, "bytes", "Size of all pinned objects"),
    # the warm tier
    Definition("demotions", _C, "", "Objects that were to go from hot to warm, by what became of them", ("outcome",)),
    Definition("demoted_bytes", _C, "bytes", "Bytes of objects written to the warm tier, before compression"),
    Definition("demoted_stored_bytes", _C, "bytes", "Bytes written to the warm tier for them: pieces, parity and manifests"),
    Definition("warm_degraded_reads", _C, "", "Stripes read from the warm tier that had to be reconstructed"),
    Definition("warm_hedges", _C, "", "Further pieces asked for because one was late or failed"),
    Definition("warm_repairs", _C, "", "Copies of the warm tier that were repaired, or could not be", ("outcome",)),
    Definition("warm_scrubbed_bytes", _C, "bytes", "Bytes of the warm tier read by scrubs"),
    Definition("warm_damage", _C, "", "Damage of the warm tier that reads and scrubs have found", ("kind",)),
    Definition("warm_packs", _G, "", "Packs of small objects that are known to be on the targets"),
    Definition("warm_packed_objects", _G, "", "Small objects in those packs"),
    Definition("target_state", _G, "", "State of a target: 2 up, 1 suspect, 0 down", ("target",)),
    Definition("target_free_bytes", _G, "bytes", "Free space of a target's file system", ("target",)),
    Definition("target_errors", _G, "", "Operations on a target that have failed since the daemon started", ("target",)),
    # the tiers below
    Definition("requests", _C, "", "Requests to a tier, each attempt counted", ("tier", "operation")),
    Definition("request_seconds", _H, "seconds", "Time of a request to a tier, each attempt by itself", ("tier", "operation")),
    Definition("request_errors", _C, "", "Requests to a tier that failed", ("tier", "operation", "error")),
    Definition("retries", _C, "", "Requests to a tier that were tried again", ("tier", "operation")),
    Definition("replica_ignored", _C, "", "Times that a replica's file was not used", ("reason",)),
    # the daemon itself
    Definition("index_rebuilt", _C, "", "Times that a damaged index was set aside and rebuilt"),
    Definition("loop_delay_seconds", _H, "seconds", "How late the event loop woke for a timer", (), _EXPERIMENTAL),
    Definition("build_info", _G, "", "Always 1; the labels tell what runs", ("version", "python")),
)

_BY_ATTRIBUTE = {definition.attribute: definition for definition in DEFINITIONS}
assert len(_BY_ATTRIBUTE) == len(DEFINITIONS), "a metric is declared twice"


class Metrics:
    """The metrics of one daemon. Each attribute's meaning and labels are in DEFINITIONS under its name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        self.opens = self._counter("opens")
        self.reads = self._counter("reads")
        self.read_bytes = self._counter("read_bytes")
        self.read_seconds = self._histogram("read_seconds")
        self.operation_seconds = self._histogram("operation_seconds")
        self.errors = self._counter("errors")
        self.native_opened_bytes = self._counter("native_opened_bytes")
        self.hits = self._counter("hits")
        self.misses = self._counter("misses")
        self.unreachable_keys = self._gauge("unreachable_keys")

        self.fills = self._counter("fills")
        self.fill_bytes = self._counter("fill_bytes")
        self.fill_failures = self._counter("fill_failures")
        self.streamed_bytes = self._counter("streamed_bytes")
        self.read_ahead_bytes = self._counter("read_ahead_bytes")
        self.evictions = self._counter("evictions")
        self.evicted_bytes = self._counter("evicted_bytes")
        self.hot_used_bytes = self._gauge("hot_used_bytes")
        self.open_handles = self._gauge("open_handles")
        self.published_files = self._gauge("published_files")
        self.backing_files = self._gauge("backing_files")
        self.hot_capacity_bytes = self._gauge("hot_capacity_bytes")
        self.hot_objects = self._gauge("hot_objects")
        self.verify_failures = self._counter("verify_failures")
        self.scrubbed_bytes = self._counter("scrubbed_bytes")
        self.pins = self._gauge("pins")
        self.pinned_bytes = self._gauge("pinned_bytes")

        self.demotions = self._counter("demotions")
        self.demoted_bytes = self._counter("demoted_bytes")
        self.demoted_stored_bytes = self._counter("demoted_stored_bytes")
        self.warm_degraded_reads = self._counter("warm_degraded_reads")
        self.warm_hedges = self._counter("warm_hedges")
        self.warm_repairs = self._counter("warm_repairs")
        self.warm_scrubbed_bytes = self._counter("warm_scrubbed_bytes")
        self.warm_damage = self._counter("warm_damage")
        self.warm_packs = self._gauge("warm_packs")
        self.warm_packed_objects = self._gauge("warm_packed_objects")
        self.target_state = self._gauge("target_state")
        self.target_free_bytes = self._gauge("target_free_bytes")
        self.target_errors = self._gauge("target_errors")

        self.requests = self._counter("requests")
        self.request_seconds = self._histogram("request_seconds")
        self.request_errors = self._counter("request_errors")
        self.retries = self._counter("retries")
        self.replica_ignored = self._counter("replica_ignored")

        self.index_rebuilt = self._counter("index_rebuilt")
        self.loop_delay_seconds = self._histogram("loop_delay_seconds")
        self.build_info = self._gauge("build_info")
        self.build_info.labels(version=__version__, python=platform.python_version()).set(1)

    def _counter(self, attribute: str) -> Counter:
        definition = _declared(attribute, Kind.COUNTER)
        return Counter(definition.name, definition.help, definition.labels, registry=self.registry)

    def _gauge(self, attribute: str) -> Gauge:
        definition = _declared(attribute, Kind.GAUGE)
        return Gauge(definition.name, definition.help, definition.labels, registry=self.registry)

    def _histogram(self, attribute: str) -> Histogram:
        definition = _declared(attribute, Kind.HISTOGRAM)
        return Histogram(definition.name, definition.help, definition.labels, registry=self.registry, buckets=SECONDS_BUCKETS)


def _declared(attribute: str, kind: Kind) -> Definition:
    definition = _BY_ATTRIBUTE[attribute]
    assert definition.kind is kind, f"{attribute} is declared as a {definition.kind.value}"
    return definition
