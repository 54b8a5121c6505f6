"""The page that Prometheus scrapes.

`_created` series are left out: they double the page, and Prometheus sees a restart by a counter's fall. prometheus_client
switches them only for the whole process, so they are dropped from what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from tiercache.metrics.definitions import Metrics

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _WithoutCreated(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def render(metrics: Metrics) -> bytes:
    """All metrics in the Prometheus text format, to be served as `CONTENT_TYPE`. May be called from any thread."""
    page = CollectorRegistry(auto_describe=False)
    page.register(_WithoutCreated(metrics.registry))
    return generate_latest(page)
